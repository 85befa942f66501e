"""Kernels of quantized linear layers.

- `quantize_rows`: rows as codes of 8 bits with scales. How they are rounded says `layers/rounding`; norm and gate
  kernels write the same bits by the device functions of `layers/round_row`.
- `operands`: weights of 8 bits, and their product with rounded rows in plain torch. `linear_w8a8_skinny`: products of
  one to eight rows; `linear_w8a8_stream_k`: of any number of rows, on tensor cores.

The worker's `quantization/kept/` and `linear_tuning/` call these. Imports go to `layers/`.
"""
