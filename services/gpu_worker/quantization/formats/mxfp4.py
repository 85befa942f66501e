"""Weights stored in mxfp4, which become numbers of the model's dtype while they are loaded, or stay as they are.

The format is OCP's Microscaling Formats (MX) v1.0: blocks of 32 values of 4 bits (e2m1: sign, two bits of exponent, one
of mantissa) have a scale of 8 bits (e8m0: a power of two, its exponent plus 127). As in gpt-oss, a checkpoint has a
matrix [out, in] as `name`_blocks [out, in / 32, 16] uint8, two values in a byte, the first one in its lower half, and
`name`_scales [out, in / 32] uint8.

Tensors come in any order and from several threads. So values are written as they come, without their scales, and are
multiplied in place once all are loaded: no weight is in memory twice, and a power of two rounds nothing.

With `KEEPS_CODES` they are kept as `Table4A16`, in a quarter of the memory. Until kernels of experts read that form,
each step would unpack all experts, so it is off.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.linear_spec import Arrange, Cut, ExpertSpec, LinearSpec, Split
from blockyard.services.gpu_worker.loading.weights import WeightTable, after
from blockyard.services.gpu_worker.quantization.dense import UnquantizedFormat, allocate_experts, targets
from blockyard.services.gpu_worker.quantization.formats.layouts.settings import exponents
from blockyard.services.gpu_worker.quantization.kept import table4_a16
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import E2M1, Table4A16
from blockyard.services.gpu_worker.quantization.method import ExpertMethod, LinearMethod
from blockyard.services.gpu_worker.quantization.names import NamePatterns
from blockyard.services.gpu_worker.quantization.quantized_format import QuantizedFormat
from blockyard.services.gpu_worker.quantization.scheme import Matrix, StoredMatrix
from blockyard.shared.errors import ConfigError

BLOCK = 32  # values of a scale
BIAS = 127  # of exponents
BYTES = frozenset({torch.uint8})
KEEPS_CODES = False
FORM = Table4A16(E2M1, BLOCK, torch.float8_e8m0fnu)


class Mxfp4Format:
    """gpt-oss's: stacked experts alone are quantized. Implements `Format`."""

    def __init__(self, table: WeightTable) -> None:
        self._others = UnquantizedFormat()
        self._kept = QuantizedFormat(Mxfp4Scheme(), table) if KEEPS_CODES else None

    def linear(self, table: WeightTable, spec: LinearSpec) -> LinearMethod:
        return self._others.linear(table, spec)

    def experts(self, table: WeightTable, spec: ExpertSpec) -> ExpertMethod:
        if not spec.stacked:
            return self._others.experts(table, spec)
        if self._kept is not None:
            return self._kept.experts(table, spec)
        made = allocate_experts(table, spec)
        place_blocks(table, spec, made.weight)
        return made

    def plain(self, table: WeightTable, spec: LinearSpec, dtype: torch.dtype) -> Tensor:
        return self._others.plain(table, spec, dtype)


class Mxfp4Scheme:
    """Implements `Scheme`."""

    def patterns(self) -> list[NamePatterns]:
        return []

    def stored(self, matrix: Matrix) -> StoredMatrix | None:
        if matrix.experts is None:
            return None
        check_inputs(matrix.inputs)
        scales = (matrix.outputs, matrix.inputs // BLOCK)
        tensors = {
            "blocks": matrix.stored("blocks", (*scales, BLOCK // 2), BYTES),
            "scales": matrix.stored("scales", scales, BYTES),
        }
        return StoredMatrix(form=FORM, tensors=tensors, to_kept=partial(_to_kept, matrix))


def _to_kept(matrix: Matrix, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    scales = exponents(matrix.tensor("scales"), tensors["scales"])
    return {table4_a16.CODES: tensors["blocks"].flatten(-2), table4_a16.SCALES: scales}


def check_inputs(size: int) -> None:
    """Raises ConfigError for inputs that are no whole blocks."""
    if size % BLOCK:
        raise ConfigError(f"config.json: mxfp4 weights of {size} inputs; a multiple of {BLOCK} is needed")


def place_blocks(table: WeightTable, experts: ExpertSpec, weight: Tensor) -> None:
    """Places the blocks and scales of stacked matrices. Raises ConfigError if a rank's inputs are no whole blocks.

    weight: [experts, out, in] in the dtype of the model, of this rank.
    """
    spec = experts.matrix
    [one] = spec.parts
    num_experts, size = experts.num_experts, spec.in_features
    cut = spec.cut(one, table.shard) if experts.own is None else Cut(0, (experts.own,))
    check_inputs(size)
    scales_cut = _in_blocks(cut) if cut is not None and spec.split is Split.INPUTS else cut
    scales = table.empty(*weight.shape[:-1], weight.shape[-1] // BLOCK, dtype=torch.uint8)
    [(_, target, arrange)] = targets(table, spec, weight, -2)
    [(_, scales_target, _)] = targets(table, spec, scales, -2)
    shape, scales_name = (num_experts, one.size, size // BLOCK), f"{one.name}_scales"
    of_expert = cut if experts.own is None else None
    write = partial(_write_values, after(arrange, of_expert), experts.own)
    table.place(f"{one.name}_blocks", target, (*shape, BLOCK // 2), stored=BYTES, write=write)
    table.place(scales_name, scales_target, shape, arrange, stored=BYTES, cut=scales_cut, fill=_fill_with_ones)

    def finish() -> None:
        exponents(scales_name, scales)
        for matrix, own in zip(weight, scales, strict=True):
            multiply(matrix, own)
        table.forget(scales_name)

    table.after_load(finish)


def _in_blocks(cut: Cut) -> Cut:
    """The cut of the scales of inputs."""
    if any(own.start % BLOCK or own.stop % BLOCK for own in cut.ranges):
        inputs = ", ".join(f"{own.start} to {own.stop - 1}" for own in cut.ranges)
        raise ConfigError(f"mxfp4 weights: inputs {inputs}, which a rank has, are no whole blocks of {BLOCK}")
    return Cut(cut.dim, tuple(range(own.start // BLOCK, own.stop // BLOCK) for own in cut.ranges))


def _fill_with_ones(scales: Tensor, _: torch.Generator) -> None:
    """Fills the scales of dummy weights. Their values are filled as in other formats."""
    scales.fill_(BIAS)


def decode(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of blocks [..., in / 32, 16] uint8 without their scales: [..., in]."""
    codes = torch.tensor(E2M1, dtype=dtype, device=blocks.device)
    pairs = torch.stack((codes.repeat(16), codes.repeat_interleave(16)), -1)  # of each byte
    return pairs[blocks.int()].flatten(-3)


def multiply(values: Tensor, scales: Tensor) -> None:
    """Multiplies values [..., in] in place by 2 ** (scales - 127), scales [..., in / 32] uint8."""
    powers = scales.to(values.device).int() - BIAS  # offloaded values are in host memory
    factors = torch.ldexp(torch.ones(powers.shape, device=values.device), powers)
    values.view(*scales.shape, BLOCK).mul_(factors[..., None])


def _write_values(arrange: Arrange | None, own: range | None, target: Tensor, blocks: Tensor) -> None:
    """One expert at a time: a second copy of a whole stack is large. own: experts that the rank has; None: all."""
    for i, expert in enumerate(own or range(len(target))):
        values = decode(blocks[expert : expert + 1], target.dtype)
        target[i].copy_((values if arrange is None else arrange(values))[0])
