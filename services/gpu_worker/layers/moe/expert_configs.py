"""Tile sizes of the products of a mixture's experts on a GPU: the candidates, and the ones used before any is measured.

These are functions of numbers, without torch. `GroupedExperts` computes with a config, `linear_tuning.expert_tuner`
measures which is the fastest for the experts of a model.
"""

import math
from collections.abc import Mapping

import msgspec

Tiles = tuple[int, int, int, int]  # fields of `GroupedTiling`, in order


class ExpertShape(msgspec.Struct, frozen=True, order=True):
    """The experts of layers that share their configs."""

    num_experts: int
    top_k: int  # experts of each row
    hidden: int
    inner: int


class ExpertConfig(msgspec.Struct, frozen=True):
    """How both products are computed."""

    tile: int  # pairs of row and expert
    gate_up: Tiles
    down: Tiles


# most pairs an expert, on average -> candidates; the first one was the fastest for Qwen3-30B-A3B on an H200
CANDIDATES = {
    0.25: (
        ExpertConfig(16, (64, 128, 4, 4), (32, 128, 3, 2)),
        ExpertConfig(16, (64, 128, 3, 4), (64, 128, 3, 4)),
        ExpertConfig(16, (64, 64, 5, 4), (64, 64, 5, 4)),
    ),
    8.0: (
        ExpertConfig(16, (64, 128, 3, 4), (64, 128, 3, 4)),
        ExpertConfig(16, (64, 64, 5, 4), (64, 64, 5, 4)),
        ExpertConfig(16, (128, 128, 3, 8), (128, 128, 3, 8)),
    ),
    32.0: (
        ExpertConfig(32, (128, 128, 3, 8), (64, 128, 3, 4)),
        ExpertConfig(32, (64, 128, 3, 4), (128, 128, 3, 8)),
        ExpertConfig(16, (64, 128, 3, 4), (64, 128, 3, 4)),
    ),
    96.0: (
        ExpertConfig(64, (128, 64, 3, 8), (64, 64, 3, 4)),
        ExpertConfig(32, (128, 128, 3, 8), (64, 128, 3, 4)),
        ExpertConfig(128, (128, 64, 3, 8), (64, 64, 3, 4)),
    ),
    math.inf: (
        ExpertConfig(128, (128, 64, 3, 8), (64, 64, 3, 4)),
        ExpertConfig(64, (128, 64, 3, 8), (64, 64, 3, 4)),
    ),
}
BATCH_INVARIANT = ExpertConfig(32, (128, 128, 3, 8), (64, 128, 3, 4))  # for any number of rows
TUNED_PREFILL_ROWS = (512, 1024, 2048, 4096, 8192)  # measured beside the rows of decode steps
MOST_DISTANCE = 1.5  # a config serves numbers of rows that differ from the measured one by at most this factor


def candidates(shape: ExpertShape, rows: int) -> tuple[ExpertConfig, ...]:
    """The configs to measure, the first one first."""
    pairs = rows * shape.top_k / shape.num_experts
    return next(some for most, some in CANDIDATES.items() if pairs <= most)


def pick(shape: ExpertShape, rows: int, measured: Mapping[int, ExpertConfig]) -> ExpertConfig:
    """The config of the nearest number of rows in `measured`, or the first candidate if none is near."""
    if rows in measured:
        return measured[rows]
    nearest = min(measured, key=lambda known: abs(math.log(known / max(rows, 1))), default=None)
    if nearest is None or not 1 / MOST_DISTANCE <= nearest / max(rows, 1) <= MOST_DISTANCE:
        return candidates(shape, rows)[0]
    return measured[nearest]
