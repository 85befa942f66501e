"""Kernels that multiply quantized weights.

- `packed_weights`: `PackedWeights`, the codes and scales of a weight as kernels of experts read them.
- `unpack_tiles`: what these kernels make of a tile of codes, in registers: numbers of 4- and 8-bit codes, and scales.

Imports go to other kernels only.
"""
