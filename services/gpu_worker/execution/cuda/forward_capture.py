"""Captures a forward pass as a CUDA graph, for `execution.packed_graphs`."""

from collections.abc import Callable

import torch
from torch import Tensor

from blockyard.services.gpu_worker.execution.cuda.graph_pool import GraphPool


class CudaForwardCapture:
    """Implements `packed_graphs.Capture`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, GraphPool()

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """compute: launches kernels alone, and reads only tensors that stay. Its output stays, too."""
        compute()  # compiles and loads its kernels
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with self._pool.capturing(graph):
            output = compute()
        graph.replay()  # the first replay uploads the graph
        torch.cuda.synchronize(self._device)
        return graph, output
