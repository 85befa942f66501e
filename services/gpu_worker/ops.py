"""What a decoder computes between its matrix products, chosen for the device when the model is built."""

import importlib
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.rms_norm import RMSNorm


class Ops(Protocol):
    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        """[rows, hidden]: adds delta to residual in place, returns the norm of the sum."""

    def gate(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * inner] -> silu(gate) * up, [rows, inner]; may write to gate_up."""


class TorchOps:
    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        if delta is not None:
            residual.add_(delta)
        return norm(residual)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


def find_ops(device: torch.device) -> Ops:
    """Triton is loaded by name, for a GPU alone."""
    if device.type != "cuda":
        return TorchOps()
    return cast(Ops, importlib.import_module("blockyard.services.gpu_worker.triton_ops").TritonOps())
