"""Kernels of quantized linear layers.

- `rounding`: how rows of inputs become codes of 8 bits, in plain torch; `Rounding` says it, `RoundedRows` has them.
- `quantize_rows`: the same on a GPU, and the device functions by which norm and gate kernels write codes themselves.
- `linear_w8a8_skinny`: products of one to eight rounded rows with weights in e4m3 or int8; `linear_w8a8_stream_k`: of
  any number of rows, on tensor cores.

The worker's `quantization/kept/` and `linear_tuning/` call these. Imports go to `layers/` for the stream-K workspace;
`layers/` imports `rounding` and the device functions of `round_row`.
"""
