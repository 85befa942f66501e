"""Layers of pipeline stages, and the places of ranks."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.stages import (
    SLACK,
    StageSizes,
    divide_layers,
    place_of,
    ranges_of,
    rank_at,
)


def sizes(
    layers: list[int], block: list[int] | None = None, first: int = 0, last: int = 0, memory: int = 10**6
) -> StageSizes:
    return StageSizes(layers=layers, block=block or [1] * len(layers), first=first, last=last, memory=memory)


@pytest.mark.parametrize(
    ("given_sizes", "num_stages", "expected"),
    [
        (sizes([10] * 8), 2, [4, 4]),
        (sizes([10] * 7), 2, [3, 4]),
        (sizes([10] * 8, last=20), 2, [5, 3]),  # the output layer costs as much as two layers
        (sizes([10] * 8, first=20), 2, [4, 4]),  # a step reads few rows of the embeddings
        (sizes([5, 5, 20, 20, 20, 20]), 2, [4, 2]),  # dense layers before mixtures
        (sizes([10] * 3), 3, [1, 1, 1]),
        (sizes([40] * 50, first=400, memory=1800), 2, [24, 26]),  # the embeddings take room for KV blocks
    ],
)
def test_division(given_sizes: StageSizes, num_stages: int, expected: list[int]) -> None:
    assert divide_layers(given_sizes, num_stages) == expected


def divisions(num_layers: int, num_stages: int) -> list[list[int]]:
    ends = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [[b - a for a, b in itertools.pairwise((0, *one, num_layers))] for one in ends]


def worst(of: StageSizes, counts: list[int]) -> tuple[int, int]:
    """The cost of the slowest stage, and the fewest blocks of a stage."""
    parts = list(enumerate(ranges_of(counts)))
    costs = [of.cost(stage, len(counts), layers) for stage, layers in parts]
    return max(costs), min(of.num_blocks(stage, len(counts), layers) for stage, layers in parts)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_division_is_better(data: st.DataObject) -> None:
    num_layers = data.draw(st.integers(1, 9))
    num_stages = data.draw(st.integers(1, min(num_layers, 4)))
    numbers = st.lists(st.integers(1, 30), min_size=num_layers, max_size=num_layers)
    edge = st.integers(0, 60)
    it = sizes(data.draw(numbers), data.draw(numbers), data.draw(edge), data.draw(edge), data.draw(st.integers(0, 500)))
    found = divide_layers(it, num_stages)
    assert len(found) == num_stages and sum(found) == num_layers and min(found) >= 1
    all_worst = [worst(it, one) for one in divisions(num_layers, num_stages)]
    slowest = (1 + SLACK) * min(cost for cost, _ in all_worst)
    most = max(blocks for cost, blocks in all_worst if cost <= slowest)
    assert worst(it, found) == (min(cost for cost, blocks in all_worst if cost <= slowest and blocks == most), most)


@pytest.mark.parametrize(("tensor_size", "num_stages"), [(1, 1), (3, 1), (1, 4), (2, 2), (3, 4)])
def test_each_stage_has_all_shards(tensor_size: int, num_stages: int) -> None:
    """The leader, rank 0, is the first rank of the last stage."""
    places = [place_of(rank, tensor_size, num_stages) for rank in range(tensor_size * num_stages)]
    assert places[0].stage == num_stages - 1 and places[0].shard == Shard(0, tensor_size)
    assert {(place.stage, place.shard.rank) for place in places} == set(
        itertools.product(range(num_stages), range(tensor_size))
    )
    for place in places:
        assert {rank for rank in range(tensor_size) if places[rank].stage == num_stages - 1} == set(range(tensor_size))
        for stage in range(num_stages):
            other = places[rank_at(place, stage)]
            assert (other.stage, other.shard) == (stage, place.shard)
