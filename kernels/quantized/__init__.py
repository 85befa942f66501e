"""Kernels that multiply quantized weights.

- `packed_weights`: `PackedWeights`, the codes and scales of a weight as files and kernels of experts have them.
  `unpack_tiles`: what kernels make of a tile of codes, in registers: numbers of 4- and 8-bit codes, and scales.
- `block_weights`: `BlockWeights`, the same of a linear layer, in the order of its products: `linear_blocks` on tensor
  cores, `linear_blocks_mma` of up to 16 rows with 4 bits, whose codes never leave registers, `linear_blocks_wgmma` of
  nine and more on Hopper with the operand that `left_operand` makes of such codes, and `linear_blocks_skinny` of one to
  eight rows, with the norm, the gate and the sum around it. For these `unpack_assembly` has a GPU's instructions, and
  `number_pairs` multiplies what they make.
  `unpack_blocks` writes its numbers to memory.
- `quantize_rows`: rows as codes of 8 bits with scales. How they are rounded says `layers/rounding`; norm and gate
  kernels write the same bits by the device functions of `layers/round_row`.
- `operands`: weights of 8 bits, and their product with rounded rows in plain torch. `linear_w8a8_skinny`: products of
  one to eight rows; `linear_w8a8_rounding`: of one or two that it normalises and rounds itself; `linear_w8a8_stream_k`:
  of any number of rows, on tensor cores.

The worker's `quantization/kept/`, `linear_tuning/` and `layers/moe/` call these. Imports go to `layers/`.
"""
