"""What a decoder computes between its matrix products, chosen for the device when the model is built."""

import importlib
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.linear import Linear


class Ops(Protocol):
    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        """[rows, hidden]: adds delta to residual in place, returns the norm of the sum."""

    def enter(self, linear: Linear, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        """linear(add_norm(residual, delta, norm))."""

    def leave(self, linear: Linear, x: Tensor, residual: Tensor, gated: bool = False) -> Tensor | None:
        """linear(x), still to be added to residual; None: it has been. `gated`: x is gates and what they
        are for, and may be written to."""


class TorchOps:
    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        if delta is not None:
            residual.add_(delta)
        return norm(residual)

    def enter(self, linear: Linear, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        return linear(self.add_norm(residual, delta, norm))

    def leave(self, linear: Linear, x: Tensor, residual: Tensor, gated: bool = False) -> Tensor | None:
        if gated:
            gate, up = x.chunk(2, -1)
            x = F.silu(gate).mul_(up)
        return linear(x)


def find_ops(device: torch.device) -> Ops:
    """Triton is loaded by name, for a GPU alone."""
    if device.type != "cuda":
        return TorchOps()
    return cast(Ops, importlib.import_module("blockyard.services.gpu_worker.attention.triton_attention").TritonOps())
