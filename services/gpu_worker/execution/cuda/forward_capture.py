"""Captures a forward pass as a CUDA graph, for `execution.packed_graphs`."""

import time
from collections.abc import Callable

import torch

from blockyard.services.gpu_worker.execution.cuda.graph_pool import GraphPool
from blockyard.services.gpu_worker.execution.packed_graphs import CapturedForward


class CudaForwardCapture:
    """Implements `packed_graphs.Capture`."""

    def __init__(self, device: torch.device, most_bytes: int | None = None) -> None:
        """most_bytes: of a computation that is captured; None: any."""
        self._device, self._pool, self._most_bytes = device, GraphPool(), most_bytes

    def __call__(self, compute: Callable[[], None]) -> CapturedForward | None:
        """compute: launches kernels alone, and reads and writes only tensors that stay."""
        held = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        compute()  # compiles and loads its kernels
        torch.cuda.synchronize(self._device)
        if self._most_bytes is not None and torch.cuda.max_memory_allocated(self._device) - held > self._most_bytes:
            return None
        graph = torch.cuda.CUDAGraph()
        with self._pool.capturing(graph):
            begun = time.perf_counter()
            compute()
            launch_s = time.perf_counter() - begun
        device_s = 0.0
        for _ in range(2):  # the first replay uploads the graph
            begun = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize(self._device)
            device_s = time.perf_counter() - begun
        return CapturedForward(graph, launch_s, device_s)
