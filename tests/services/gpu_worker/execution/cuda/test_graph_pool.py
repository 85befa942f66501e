"""Graphs share memory as long as one of them is there. The fake refuses what torch's allocator refuses."""

from collections import Counter
from itertools import count

import pytest
import torch

from blockyard.services.gpu_worker.execution.cuda.graph_pool import GraphPool
from blockyard.services.gpu_worker.host_link import SameMemory

Handle = tuple[int, int]


class FakeGraph:
    """A graph whose memory still has tensors when it is dropped."""

    def __init__(self, uses: Counter[Handle]) -> None:
        self._uses = uses
        self.pool: Handle | None = None

    def capture_begin(self, pool: Handle, capture_error_mode: str) -> None:
        if self._uses.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        self._uses[pool] += 1
        self.pool = pool

    def capture_end(self) -> None: ...

    def __del__(self) -> None:
        if self.pool is not None:
            self._uses[self.pool] -= 1


def test_a_pool_begins_anew_when_all_of_its_graphs_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, uses = count(1), Counter[Handle]()
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    pool, stream = GraphPool(), SameMemory().stream()

    def capture() -> FakeGraph:
        graph = FakeGraph(uses)
        with pool.capturing_on(stream, graph):  # type: ignore[arg-type]
            pass
        return graph

    graphs = [capture() for _ in range(3)]
    assert {graph.pool for graph in graphs} == {(0, 1)}
    graphs = graphs[1:]
    graphs.append(capture())
    assert {graph.pool for graph in graphs} == {(0, 1)}, "some are left"
    graphs.clear()
    graphs = [capture() for _ in range(2)]
    assert {graph.pool for graph in graphs} == {(0, 2)}


def test_a_capture_that_fails_leaves_no_graph_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count(1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    pool, stream, graph = GraphPool(), SameMemory().stream(), FakeGraph(Counter())
    with pytest.raises(RuntimeError, match="out of memory"), pool.capturing_on(stream, graph):  # type: ignore[arg-type]
        raise RuntimeError("out of memory")
    again = FakeGraph(Counter())
    with pool.capturing_on(stream, again):  # type: ignore[arg-type]
        pass
    assert (graph.pool, again.pool) == ((0, 1), (0, 2))
