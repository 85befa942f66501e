"""Kernels and tile sizes of the products of a mixture's experts on a GPU: the candidates, and which one is used.

These are functions of numbers, without torch. `GroupedExperts` computes with a config, `linear_tuning.expert_tuner`
measures which one is the fastest for the experts of a model.
"""

import math
from collections.abc import Mapping
from typing import Literal

import msgspec

DENSE = "dense"  # the form of weights in the dtype of the model


class ExpertShape(msgspec.Struct, frozen=True, order=True):
    """The experts of layers that share their configs."""

    num_experts: int
    top_k: int  # experts of each row
    hidden: int
    inner: int
    takes_prefill: bool = True  # `grouped_linear_prefill` can read the weights
    form: str = DENSE  # of the weights with its parameters, see `ExpertProduct`
    takes_mma: bool = False  # the kernels of `four_bits` multiply both weights
    rounds_inputs: bool = False  # to 8 bits


class ExpertConfig(msgspec.Struct, frozen=True):
    """How both products are computed."""

    # `experts_skinny`, `grouped_linear`, `grouped_linear_prefill`; of `four_bits` "mma" for both products,
    # and "mma_sums" with a second one that sums a row's experts, too
    kernel: Literal["skinny", "grouped", "prefill", "mma", "mma_sums"]
    gate_up: tuple[int, ...]  # fields of the kernel's tiling, in order
    down: tuple[int, ...]
    tile: int = 0  # pairs of row and expert in a tile of the map; skinny: there is no map


def _grouped(tile: int, gate_up: tuple[int, ...], down: tuple[int, ...]) -> ExpertConfig:
    return ExpertConfig("grouped", gate_up, down, tile)


def _mma(tile: int, gate_up: tuple[int, ...], down: tuple[int, ...]) -> ExpertConfig:
    return ExpertConfig("mma", gate_up, down, tile)


def _mma_sums(gate_up: tuple[int, ...], down: tuple[int, ...]) -> ExpertConfig:
    return ExpertConfig("mma_sums", gate_up, down, 16)


# The first candidate of each list was the fastest on an H200 for Qwen3-30B-A3B, DeepSeek-V2-Lite, gpt-oss-20b and
# Mixtral-8x7B, or nearly so.
MOST_SKINNY_ROWS = 2
MOST_SKINNY_PAIRS = 1 / 8  # an expert, on average, of two rows: more of them have the same expert and read it twice
SKINNY = {  # most inputs of `down` -> candidates
    1024: (
        ExpertConfig("skinny", (4, 512, 4), (8, 256, 8)),
        ExpertConfig("skinny", (4, 512, 4), (4, 256, 4)),
        ExpertConfig("skinny", (1, 2048, 1), (8, 256, 8)),
    ),
    2048: (
        ExpertConfig("skinny", (4, 512, 4), (1, 256, 2)),
        ExpertConfig("skinny", (4, 512, 4), (4, 256, 4)),
        ExpertConfig("skinny", (4, 512, 4), (8, 256, 8)),
    ),
    4096: (
        ExpertConfig("skinny", (4, 512, 4), (4, 256, 8)),
        ExpertConfig("skinny", (4, 512, 4), (2, 256, 4)),
    ),
    math.inf: (
        ExpertConfig("skinny", (4, 512, 4), (2, 512, 8)),
        ExpertConfig("skinny", (4, 512, 4), (2, 512, 4)),
    ),
}
GROUPED = {  # most pairs an expert, on average -> candidates
    0.25: (
        _grouped(16, (64, 128, 4, 4), (32, 128, 3, 2)),
        _grouped(16, (64, 128, 3, 4), (64, 128, 3, 4)),
        _grouped(16, (64, 64, 5, 4), (64, 64, 5, 4)),
    ),
    1.0: (
        _grouped(16, (64, 128, 3, 4), (64, 64, 3, 4)),
        _grouped(16, (64, 128, 3, 4), (64, 128, 3, 4)),
        _grouped(16, (64, 64, 5, 4), (64, 64, 5, 4)),
    ),
    8.0: (
        _grouped(16, (64, 128, 3, 4), (64, 128, 3, 4)),
        _grouped(16, (64, 64, 5, 4), (64, 64, 5, 4)),
        _grouped(16, (128, 128, 3, 8), (128, 128, 3, 8)),
    ),
    32.0: (
        _grouped(32, (128, 128, 3, 8), (64, 128, 3, 4)),
        _grouped(32, (64, 128, 3, 4), (128, 128, 3, 8)),
        _grouped(16, (64, 128, 3, 4), (64, 128, 3, 4)),
    ),
    96.0: (
        _grouped(64, (128, 64, 3, 8), (64, 64, 3, 4)),
        _grouped(32, (128, 128, 3, 8), (64, 128, 3, 4)),
        _grouped(128, (128, 64, 3, 8), (64, 64, 3, 4)),
    ),
    math.inf: (
        _grouped(128, (128, 64, 3, 8), (64, 64, 3, 4)),
        _grouped(64, (128, 64, 3, 8), (64, 64, 3, 4)),
    ),
}
# Of an expert, on average. Fewer gain at most a few per cent, and tiles that are mostly empty take memory, of which
# graphs of prefills may have only so much.
FEWEST_PREFILL_PAIRS = 64
PREFILL_TILE = 192
PREFILL = (
    ExpertConfig("prefill", (128, 64, 4, 8, 1), (256, 64, 4, 8, 1), PREFILL_TILE),
    ExpertConfig("prefill", (128, 64, 4, 8, 4), (256, 64, 4, 8, 1), PREFILL_TILE),
    ExpertConfig("prefill", (128, 64, 4, 8, 4), (256, 64, 4, 8, 4), PREFILL_TILE),
)
BATCH_INVARIANT = _grouped(32, (128, 128, 3, 8), (64, 128, 3, 4))  # for any number of rows

# Of quantized weights. Tiles hold codes, which take a half or a quarter of the memory, so they have more inputs.
QUANTIZED_SKINNY = (
    ExpertConfig("skinny", (4, 1024, 4), (2, 512, 8)),
    ExpertConfig("skinny", (4, 2048, 4), (1, 512, 4)),
    ExpertConfig("skinny", (2, 2048, 4), (8, 256, 8)),
    ExpertConfig("skinny", (4, 512, 4), (4, 256, 8)),
    ExpertConfig("skinny", (2, 1024, 2), (2, 1024, 8)),
)
# The same with inputs that are rounded. Each program rounds what it reads, which takes more instructions than a
# product: programs of few outputs spend most of their time on it.
ROUNDING_SKINNY = (
    ExpertConfig("skinny", (8, 1024, 4), (8, 256, 4)),
    ExpertConfig("skinny", (8, 2048, 8), (16, 256, 8)),
    ExpertConfig("skinny", (8, 1024, 4), (8, 256, 8)),
    ExpertConfig("skinny", (4, 1024, 4), (4, 256, 4)),
    ExpertConfig("skinny", (4, 1024, 4), (2, 512, 8)),
)
QUANTIZED_GROUPED = {  # most pairs an expert, on average -> candidates
    8.0: (
        _grouped(16, (64, 128, 4, 4), (64, 128, 4, 4)),
        _grouped(16, (64, 128, 3, 4), (64, 128, 3, 4)),
        _grouped(16, (64, 128, 5, 4), (64, 128, 5, 4)),
        _grouped(16, (128, 128, 3, 8), (128, 128, 3, 8)),
        _grouped(16, (64, 64, 6, 4), (64, 64, 6, 4)),
    ),
    32.0: (
        _grouped(32, (64, 128, 3, 4), (64, 128, 4, 4)),
        _grouped(32, (128, 128, 3, 8), (128, 128, 3, 8)),
        _grouped(16, (64, 128, 4, 4), (64, 128, 4, 4)),
        _grouped(16, (128, 128, 3, 8), (128, 128, 3, 8)),
    ),
    96.0: (
        _grouped(64, (128, 64, 3, 8), (128, 64, 4, 8)),
        _grouped(64, (128, 128, 3, 8), (128, 128, 3, 8)),
        _grouped(64, (64, 64, 4, 4), (64, 64, 4, 4)),
        _grouped(32, (128, 128, 3, 8), (128, 128, 3, 8)),
    ),
    math.inf: (
        _grouped(128, (64, 128, 3, 8), (128, 64, 4, 8)),
        _grouped(128, (128, 64, 3, 8), (128, 128, 3, 8)),
        _grouped(128, (64, 64, 4, 8), (128, 64, 4, 8)),
        _grouped(64, (128, 128, 3, 8), (128, 128, 3, 8)),
    ),
}
# Of weights with 4 bits in registers: rows of a weight that a program reads, warps, steps loaded ahead; then the most
# registers, whether codes wait in shared memory, and how many times more warps share the rows.
# The first candidates were the fastest on an H200 for Qwen3-30B-A3B with int4 and for gpt-oss-20b with mxfp4.
MMA_SUMS = {  # most inputs of `down` -> candidates
    1024: (
        _mma_sums((16, 4, 1), (16, 8, 3)),
        _mma_sums((32, 4, 4, 0, 1), (16, 8, 3)),
        _mma_sums((16, 4, 1), (16, 16, 1)),
        _mma_sums((32, 4, 2), (16, 16, 1)),
    ),
    math.inf: (
        _mma_sums((64, 4, 1), (16, 8, 2)),
        _mma_sums((64, 4, 1), (16, 16, 1)),
        _mma_sums((64, 4, 3, 0, 1), (16, 8, 4, 0, 1)),
        _mma_sums((32, 4, 2), (16, 16, 1)),
    ),
}
MMA_OF_ROW = (_mma(8, (32, 4, 1), (32, 4, 1)),)  # the norm behind it adds the products
MMA = {  # most pairs an expert, on average -> candidates
    4.0: (
        _mma(8, (32, 2, 2, 0, 1), (64, 1, 1, 168)),
        _mma(8, (32, 2, 3, 0, 1), (32, 1, 4, 0, 1)),
        _mma(8, (128, 1, 1, 168, 0, 2), (128, 1, 1, 168, 0, 2)),
        _mma(8, (64, 2, 1, 168), (64, 1, 1, 168)),
        _mma(8, (32, 4, 1), (32, 4, 1)),
    ),
    32.0: (
        _mma(16, (64, 2, 1, 168), (64, 1, 1)),
        _mma(16, (256, 1, 1, 168, 0, 4), (256, 1, 1, 168, 0, 4)),
        _mma(16, (128, 1, 1, 168, 0, 2), (128, 1, 1, 168, 0, 2)),
        _mma(8, (256, 1, 1, 0, 0, 4), (256, 1, 1, 0, 0, 4)),
        _mma(16, (64, 2, 1, 168), (64, 2, 1, 168)),
        _mma(16, (64, 4, 1, 168), (64, 4, 1, 168)),
        _mma(16, (32, 4, 1), (32, 4, 1)),
    ),
}
MOST_MMA_PAIRS = 16  # an expert, on average, up to which these come first: tiles of more read a weight several times
QUANTIZED_BATCH_INVARIANT = _grouped(32, (64, 128, 3, 4), (64, 128, 3, 4))
TUNED_PREFILL_ROWS = (512, 1024, 2048, 4096, 8192)  # measured beside the rows of decode steps
MOST_DISTANCE = 1.5  # a config serves numbers of rows that differ from the measured one by at most this factor


def candidates(shape: ExpertShape, rows: int) -> tuple[ExpertConfig, ...]:
    """The configs to measure. The first one is used until then."""
    pairs, is_quantized = rows * shape.top_k / shape.num_experts, shape.form != DENSE
    lists = QUANTIZED_GROUPED if is_quantized else GROUPED
    grouped = _of_number(pairs, lists)
    is_skinny = rows == 1 or (1 < rows <= MOST_SKINNY_ROWS and pairs <= MOST_SKINNY_PAIRS)
    if shape.takes_mma and pairs <= max(MMA):
        mma = _of_number(pairs, MMA)
        if is_skinny:
            return _of_number(shape.inner, MMA_SUMS) + MMA_OF_ROW + QUANTIZED_SKINNY[:1] + grouped[:1]
        return mma + grouped[:2] if pairs <= MOST_MMA_PAIRS else grouped[:2] + mma
    if is_skinny:
        quantized = ROUNDING_SKINNY if shape.rounds_inputs else QUANTIZED_SKINNY
        return (quantized if is_quantized else _of_number(shape.inner, SKINNY)) + grouped
    if shape.takes_prefill and pairs >= FEWEST_PREFILL_PAIRS:
        return PREFILL + grouped
    return grouped


def _of_number(number: float, lists: Mapping[float, tuple[ExpertConfig, ...]]) -> tuple[ExpertConfig, ...]:
    return next(some for most, some in lists.items() if number <= most)


def batch_invariant(shape: ExpertShape) -> ExpertConfig:
    """The config of any number of rows where a row has the same bits in all of them."""
    return BATCH_INVARIANT if shape.form == DENSE else QUANTIZED_BATCH_INVARIANT


def pick(shape: ExpertShape, rows: int, measured: Mapping[int, ExpertConfig]) -> ExpertConfig:
    """The config of the nearest number of rows in `measured`, or the first candidate if none is near."""
    if rows in measured:
        return measured[rows]
    near = [
        known
        for known in measured
        if min(known, rows) > MOST_SKINNY_ROWS and 1 / MOST_DISTANCE <= known / rows <= MOST_DISTANCE
    ]
    if not near:
        return candidates(shape, rows)[0]
    return measured[min(near, key=lambda known: abs(math.log(known / rows)))]


def pick_unfused(shape: ExpertShape, rows: int, measured: Mapping[int, ExpertConfig]) -> ExpertConfig:
    """As `pick`, of the kernels that return the product of each pair of a row and an expert, for any weight."""
    config = pick(shape, rows, measured)
    return next(one for one in (config, *candidates(shape, rows)) if one.kernel in ("grouped", "prefill"))
