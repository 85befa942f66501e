"""The map of a layer's experts on each of its ranks, before and after trades."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from blockyard.services.gpu_worker.layers.moe.expert_places import ExpertPlaces
from blockyard.services.gpu_worker.parallel.shares import Shard

CPU = torch.device("cpu")
PADDING = -1


def found(places: ExpertPlaces, experts: list[list[int]]) -> list[list[int]]:
    return places.find(torch.tensor(experts, dtype=torch.int32)).tolist()


@pytest.mark.parametrize("num_experts", [5, 6])
def test_each_expert_has_a_place_on_one_rank(num_experts: int) -> None:
    ranks = [ExpertPlaces(num_experts, Shard(rank, 2), CPU, counts=False) for rank in range(2)]
    sizes = [places.num_own for places in ranks]
    for pair in ((0, 4), (4, 1), (2, 0)):
        if len({ranks[0].owners[expert] for expert in pair}) == 2:
            for places in ranks:
                places.trade(pair)
                places.install()
    own = [found(places, [[*range(num_experts)]])[0] for places in ranks]
    for expert, here in enumerate(zip(*own, strict=True)):
        owner = ranks[0].owners[expert]
        assert here[owner] == ranks[owner].place_of(expert) < sizes[owner]
        assert here[1 - owner] == ranks[1 - owner].elsewhere == sizes[1 - owner]
    for places, size in zip(own, sizes, strict=True):
        assert sorted(places)[:size] == list(range(size))


def test_what_is_written_is_where_it_was() -> None:
    """A CUDA graph reads the map and adds the counts at their addresses, as does a trace of this step."""
    places = ExpertPlaces(4, Shard(0, 2), CPU, counts=True)

    def find(experts: Tensor) -> Tensor:  # tracing takes no method
        return places.find(experts)

    graph = make_fx(find)(torch.tensor([[0, 3]]))
    places.loads.zero_()
    assert graph(torch.tensor([[0, 3]])).tolist() == [[0, 2]]
    places.trade((0, 3))
    places.install()
    assert graph(torch.tensor([[0, 3]])).tolist() == [[2, 0]]
    assert places.loads.tolist() == [2, 0, 0, 2]


def test_rows_of_padding_are_nowhere_and_not_counted() -> None:
    places = ExpertPlaces(4, Shard(1, 2), CPU, counts=True)
    assert found(places, [[2, 3], [PADDING, PADDING], [2, 0]]) == [[0, 1], [2, 2], [0, 2]]
    assert places.loads.tolist() == [1, 0, 2, 1]
    silent = ExpertPlaces(4, Shard(1, 2), CPU, counts=False)
    assert found(silent, [[2, PADDING]]) == [[0, 2]] and not len(silent.loads)
