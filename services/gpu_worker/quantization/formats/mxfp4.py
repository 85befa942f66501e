"""Weights stored in mxfp4, which become numbers of the model's dtype while they are loaded.

The format is OCP's Microscaling Formats (MX) v1.0: blocks of 32 values of 4 bits (e2m1: sign, two bits of exponent, one
of mantissa) have a scale of 8 bits (e8m0: a power of two, its exponent plus 127). As in gpt-oss, a checkpoint has a
matrix [out, in] as `name`_blocks [out, in / 32, 16] uint8, two values in a byte, the first one in its lower half, and
`name`_scales [out, in / 32] uint8.

Tensors come in any order and from several threads. So values are written as they come, without their scales, and are
multiplied in place once all are loaded: no weight is in memory twice, and a power of two rounds nothing.
"""

from functools import partial

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.linear_spec import Arrange, Cut, ExpertSpec, LinearSpec, Split
from blockyard.services.gpu_worker.loading.weights import WeightTable, after
from blockyard.services.gpu_worker.quantization.dense import UnquantizedFormat, allocate_experts, targets
from blockyard.services.gpu_worker.quantization.method import ExpertMethod, LinearMethod
from blockyard.shared.errors import ConfigError

BLOCK = 32  # values of a scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; codes 8 to 15 are their negatives
BIAS = 127  # of exponents
BYTES = frozenset({torch.uint8})


class Mxfp4Format:
    """gpt-oss's: stacked experts alone are quantized. Implements `Format`."""

    def __init__(self) -> None:
        self._others = UnquantizedFormat()

    def linear(self, table: WeightTable, spec: LinearSpec) -> LinearMethod:
        return self._others.linear(table, spec)

    def experts(self, table: WeightTable, spec: ExpertSpec) -> ExpertMethod:
        if not spec.stacked:
            return self._others.experts(table, spec)
        made = allocate_experts(table, spec)
        place_blocks(table, spec.matrix, made.weight)
        return made

    def plain(self, table: WeightTable, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        return self._others.plain(table, spec, dtype)


def place_blocks(table: WeightTable, spec: LinearSpec, weight: Tensor) -> None:
    """Places the blocks and scales of stacked matrices. Raises ConfigError if a rank's inputs are no whole blocks.

    weight: [experts, out, in] in the dtype of the model, of this rank.
    """
    [one] = spec.parts
    num_experts, size = len(weight), spec.in_features
    cut = spec.cut(one, table.shard)
    if size % BLOCK:
        raise ConfigError(f"config.json: mxfp4 weights of {size} inputs; a multiple of {BLOCK} is needed")
    scales_cut = _in_blocks(cut) if cut is not None and spec.split is Split.INPUTS else cut
    scales = table.empty(*weight.shape[:-1], weight.shape[-1] // BLOCK, dtype=torch.uint8)
    [(_, target, arrange)] = targets(table, spec, weight, -2)
    [(_, scales_target, _)] = targets(table, spec, scales, -2)
    shape, scales_name = (num_experts, one.size, size // BLOCK), f"{one.name}_scales"
    write = partial(_write_values, after(arrange, cut))
    table.place(f"{one.name}_blocks", target, (*shape, BLOCK // 2), stored=BYTES, write=write)
    table.place(scales_name, scales_target, shape, arrange, stored=BYTES, cut=scales_cut, fill=_fill_with_ones)

    def finish() -> None:
        for matrix, exponents in zip(weight, scales, strict=True):
            multiply(matrix, exponents)
        table.forget(scales_name)

    table.after_load(finish)


def _in_blocks(cut: Cut) -> Cut:
    """The cut of the scales of inputs."""
    if any(own.start % BLOCK or own.stop % BLOCK for own in cut.ranges):
        inputs = ", ".join(f"{own.start} to {own.stop - 1}" for own in cut.ranges)
        raise ConfigError(f"mxfp4 weights: inputs {inputs}, which a rank has, are no whole blocks of {BLOCK}")
    return Cut(cut.dim, tuple(range(own.start // BLOCK, own.stop // BLOCK) for own in cut.ranges))


def _fill_with_ones(scales: Tensor, _: torch.Generator) -> None:
    """Of dummy weights, whose values are written as those of other formats."""
    scales.fill_(BIAS)


def decode(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of blocks [..., in / 32, 16] uint8 without their scales: [..., in]."""
    codes = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=dtype, device=blocks.device)
    pairs = torch.stack((codes.repeat(16), codes.repeat_interleave(16)), -1)  # of each byte
    return pairs[blocks.int()].flatten(-3)


def multiply(values: Tensor, scales: Tensor) -> None:
    """Multiplies values [..., in] in place by 2 ** (scales - 127), scales [..., in / 32] uint8."""
    exponents = scales.to(values.device).int() - BIAS  # offloaded values are in host memory
    factors = torch.ldexp(torch.ones(exponents.shape, device=values.device), exponents)
    values.view(*scales.shape, BLOCK).mul_(factors[..., None])


def _write_values(arrange: Arrange | None, target: Tensor, blocks: Tensor) -> None:
    """One expert at a time: a second copy of a whole stack is large."""
    for expert in range(len(target)):
        values = decode(blocks[expert : expert + 1], target.dtype)
        target[expert].copy_((values if arrange is None else arrange(values))[0])
