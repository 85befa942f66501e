"""Weights stored in mxfp4, which become numbers of the model's dtype while they are loaded.

The format is OCP's Microscaling Formats (MX) v1.0: blocks of 32 values of 4 bits (e2m1: sign, two bits of exponent, one
of mantissa) have a scale of 8 bits (e8m0: a power of two, its exponent plus 127). As in gpt-oss, a checkpoint has a
matrix [out, in] as `name`_blocks [out, in / 32, 16] uint8, two values in a byte, the first one in its lower half, and
`name`_scales [out, in / 32] uint8.

Tensors come in any order and from several threads. So values are written as they come, without their scales, and are
multiplied in place once all are loaded: no weight is in memory twice, and a power of two rounds nothing.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.shared.errors import ConfigError

BLOCK = 32  # values of a scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; codes 8 to 15 are their negatives
BIAS = 127  # of exponents
BYTES = frozenset({torch.uint8})

Arrange = Callable[[Tensor], Tensor]


def place(table: WeightTable, name: str, target: Tensor, arrange: Arrange) -> None:
    """Places the blocks and scales of stacked matrices. Raises ConfigError if rows are not a multiple of a block.

    target: [experts, ..., in] in the dtype of the model, contiguous. arrange: makes a view of that shape, but for its
    last dimension, of what the checkpoint has, [experts, out, in].
    """
    num_experts, size = target.shape[0], target.shape[-1]
    if size % BLOCK:
        raise ConfigError(f"config.json: mxfp4 weights of {size} inputs; a multiple of {BLOCK} is needed")
    out = target[0].numel() // size
    scales = table.empty(*target.shape[:-1], size // BLOCK, dtype=torch.uint8).fill_(BIAS)
    blocks_name, scales_name = f"{name}_blocks", f"{name}_scales"
    shape = (num_experts, out, size // BLOCK)
    table.place(blocks_name, target, (*shape, BLOCK // 2), stored=BYTES, write=partial(_write_values, arrange))
    table.place(scales_name, scales, shape, arrange, stored=BYTES)

    def finish() -> None:
        for matrix, exponents in zip(target, scales, strict=True):
            multiply(matrix, exponents)
        table.forget(scales_name)

    table.after_load(finish)


def decode(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of blocks [..., in / 32, 16] uint8 without their scales: [..., in]."""
    codes = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=dtype, device=blocks.device)
    pairs = torch.stack((codes.repeat(16), codes.repeat_interleave(16)), -1)  # of each byte
    return pairs[blocks.int()].flatten(-3)


def multiply(values: Tensor, scales: Tensor) -> None:
    """Multiplies values [..., in] in place by 2 ** (scales - 127), scales [..., in / 32] uint8."""
    exponents = scales.int() - BIAS
    factors = torch.ldexp(torch.ones(exponents.shape, device=values.device), exponents)
    values.view(*scales.shape, BLOCK).mul_(factors[..., None])


def _write_values(arrange: Arrange, target: Tensor, blocks: Tensor) -> None:
    """One expert at a time: a second copy of a whole stack is large."""
    for expert in range(len(target)):
        target[expert].copy_(arrange(decode(blocks[expert : expert + 1], target.dtype))[0])
