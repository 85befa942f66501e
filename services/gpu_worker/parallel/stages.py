"""Which layers a pipeline stage has, and which rank is of which stage. Pure functions of numbers, without torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from blockyard.services.gpu_worker.parallel.shares import Shard

SLACK = 0.05  # by which the slowest stage may be slower than it has to, if that leaves room for more KV blocks


class Stage(NamedTuple):
    """The successive layers that the ranks of a stage have."""

    number: int
    size: int  # number of stages
    layers: range

    @property
    def is_first(self) -> bool:
        """It has the embeddings of tokens."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """It has the output layer."""
        return self.number == self.size - 1


class RankPosition(NamedTuple):
    """Where a rank of a worker is. The leader is rank 0, and the first of the last stage."""

    rank: int
    num_ranks: int
    shard: Shard  # of each layer of its stage
    stage: int
    num_stages: int


def place_of(rank: int, tensor_size: int, num_stages: int) -> RankPosition:
    """Ranks of a stage follow each other: those of the last stage, then of the first, the second and so on."""
    stage = (rank // tensor_size - 1) % num_stages
    return RankPosition(rank, tensor_size * num_stages, Shard(rank % tensor_size, tensor_size), stage, num_stages)


ONLY_RANK = place_of(0, 1, 1)


def rank_at(place: RankPosition, stage: int) -> int:
    """Returns the rank with the same shard in another stage."""
    return (stage + 1) % place.num_stages * place.shard.size + place.shard.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """What decides how layers are divided, in bytes of one rank."""

    layers: Sequence[int]  # weights of each layer
    block: Sequence[int]  # of each layer: one KV block
    first: int  # weights before the layers
    last: int  # weights behind them
    memory: int  # for weights and KV blocks

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def weights(self, stage: int, size: int, layers: range) -> int:
        return self._layers(layers) + (self.first if stage == 0 else 0) + (self.last if stage == size - 1 else 0)

    def cost(self, stage: int, size: int, layers: range) -> int:
        """The bytes that a step of many decodes reads: all weights, but for the embeddings of few tokens."""
        return self._layers(layers) + (self.last if stage == size - 1 else 0)

    def num_blocks(self, stage: int, size: int, layers: range) -> int:
        left = self.memory - self.weights(stage, size, layers)
        return left // max(sum(self.block[layer] for layer in layers), 1)

    def _layers(self, layers: range) -> int:
        return sum(self.layers[layer] for layer in layers)


def divide_layers(sizes: StageSizes, num_stages: int) -> list[int]:
    """Returns the number of layers of each stage, at least one. There are as many layers as stages, or more.

    A step takes as long as its slowest stage, and all stages have as many KV blocks as the one with the fewest: of the
    divisions whose slowest stage is at most SLACK slower than in the best one, it is that with the most blocks.
    """

    def cost(stage: int, layers: range) -> float:
        return sizes.cost(stage, num_stages, layers)

    def lack(stage: int, layers: range) -> float:
        return -sizes.num_blocks(stage, num_stages, layers)

    num = sizes.num_layers
    slowest = (1 + SLACK) * _worst(least_worst(num, num_stages, cost), cost)
    most = least_worst(num, num_stages, lambda at, own: lack(at, own) if cost(at, own) <= slowest else math.inf)
    most_lack = _worst(most, lack)
    chosen = least_worst(num, num_stages, lambda at, own: cost(at, own) if lack(at, own) <= most_lack else math.inf)
    return [len(layers) for layers in chosen]


def least_worst(num_layers: int, num_stages: int, value: Callable[[int, range], float]) -> list[range]:
    """Returns the division of layers whose largest `value` of a stage and its layers is the smallest.

    Of equal ones, earlier stages have fewer layers. Takes num_stages * num_layers ** 2 calls.
    """
    # by number of layers: the largest value of the stages so far, and where the last of them begins
    best: list[tuple[float, tuple[int, ...]]] = [(value(0, range(end)), (0,)) for end in range(1, num_layers + 1)]
    for stage in range(1, num_stages):
        grown = best.copy()
        for end in range(stage + 1, num_layers + 1):
            found = [
                (max(best[start - 1][0], value(stage, range(start, end))), (*best[start - 1][1], start))
                for start in range(stage, end)
            ]
            grown[end - 1] = min(found)
        best = grown
    starts = best[-1][1]
    return [range(start, end) for start, end in zip(starts, (*starts[1:], num_layers), strict=True)]


def ranges_of(counts: Sequence[int]) -> list[range]:
    """Returns the layers of each stage from their numbers."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _worst(division: Sequence[range], value: Callable[[int, range], float]) -> float:
    return max(value(stage, layers) for stage, layers in enumerate(division))
