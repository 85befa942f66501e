"""Stands for CUDA graphs of steps that pool: a graph computes again from what its inputs hold then."""

from collections.abc import Callable

from blockyard.services.gpu_worker.execution.packed_graphs import CapturedForward


class FakeGraph:
    def __init__(self, compute: Callable[[], None]) -> None:
        self.num_replays, self._compute = 0, compute

    def replay(self) -> None:
        self.num_replays += 1
        self._compute()


class FakeCapture:
    """Implements `packed_graphs.Capture`."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []
        self.problem = ""
        self.num_refused = 0  # next captures that take too much memory
        self.times_s = 1.0, 0.5  # of a launch, and on the device

    def __call__(self, compute: Callable[[], None]) -> CapturedForward | None:
        if self.problem:
            raise RuntimeError(f"{self.problem}\nmore")
        compute()
        if self.num_refused:
            self.num_refused -= 1
            return None
        self.graphs.append(FakeGraph(compute))
        return CapturedForward(self.graphs[-1], *self.times_s)

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)
