"""The memory that CUDA graphs share, of which at most one runs at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from blockyard.services.gpu_worker.host_link import LinkStream


class GraphPool:
    """Captures graphs. It begins anew when all of its graphs have been dropped.

    Torch takes no capture into the memory of graphs that are all gone, while a tensor of theirs is still there.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    @contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Captures what is launched, after emptying the memory cache."""
        with torch.cuda.graph(graph, pool=self._begin(), capture_error_mode="thread_local"):
            yield
        self._graphs.add(graph)

    @contextmanager
    def capturing_on(self, stream: LinkStream, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Captures what is launched. The memory cache stays: later steps need it."""
        with stream.use():
            graph.capture_begin(pool=self._begin(), capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
        self._graphs.add(graph)

    def _begin(self) -> Any:
        if self._handle is None or not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle
