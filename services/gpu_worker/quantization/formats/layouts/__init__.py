"""What formats share: how checkpoints store matrices, whatever `quant_method` says so.

- `integers`: codes of 2, 3, 4 or 8 bits with scales and zeros of groups, for the packings of GPTQ, AWQ and `marlin`.
- `stored_codes`: the tensors of compressed-tensors and Quark.
- `ggml_blocks`: the blocks of GGUF files.
- `either`: matrices of which a file does not say whether they are quantized.
- `packing`: codes of a few bits in bytes. `scales`: checks of scales.
"""
