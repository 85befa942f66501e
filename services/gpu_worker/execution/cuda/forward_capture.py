"""Captures a forward pass as a CUDA graph, for `execution.packed_graphs`."""

from collections.abc import Callable

import torch
from torch import Tensor


class CudaForwardCapture:
    """Implements `packed_graphs.Capture`. All graphs share their memory: at most one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """compute: launches kernels alone, and reads only tensors that stay. Its output stays, too."""
        compute()  # compiles and loads its kernels
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = compute()
        graph.replay()  # the first replay uploads the graph
        torch.cuda.synchronize(self._device)
        return graph, output
