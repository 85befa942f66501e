"""The product of a router in float32 as a Triton kernel. Imported only on a GPU."""

import torch
from torch import Tensor

from blockyard.kernels.moe.router_linear import MOST_TILES, router_linear, takes
from blockyard.kernels.programmatic_launch import supports_pdl
from blockyard.services.gpu_worker.quantization.dense import Float32Linear


class ExactProduct:
    """x [rows, hidden] -> logits [rows, experts] float32."""

    def __init__(self, method: Float32Linear, device: torch.device) -> None:
        """method: its `apply` computes rows that the kernel does not take."""
        self._method, self._pdl = method, supports_pdl(device)
        self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        if not takes(x):
            return self._method.apply(x)
        return router_linear(x, self._method.weight, self._arrived, pdl=self._pdl)
