"""The operations between the matrix products of a decoder, chosen for the device when the model is built."""

from typing import Protocol

import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.activations import gate
from blockyard.services.gpu_worker.layers.linear import Linear


class FusedOps(Protocol):
    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        """[rows, hidden]: adds delta to residual in place, returns the norm of the sum."""

    def norm_then_linear(self, linear: Linear, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        """linear(add_norm(residual, delta, norm))."""

    def linear_then_add(
        self, linear: Linear, x: Tensor, residual: Tensor, gate_activation: str | None = None
    ) -> Tensor | None:
        """linear(x), which the caller still has to add to residual; None: it was added.

        gate_activation: x is gate and up side by side, and linear's input is activation(gate) * up.
        x may be written to.
        """


class TorchOps:
    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        if delta is not None:
            residual.add_(delta)
        return norm(residual)

    def norm_then_linear(self, linear: Linear, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        return linear(self.add_norm(residual, delta, norm))

    def linear_then_add(
        self, linear: Linear, x: Tensor, residual: Tensor, gate_activation: str | None = None
    ) -> Tensor | None:
        return linear(x if gate_activation is None else gate(x, gate_activation))


def find_ops(device: torch.device) -> FusedOps:
    if device.type != "cuda":
        return TorchOps()
    # Triton is installed and loaded for a GPU alone
    from blockyard.services.gpu_worker.layers.triton_ops import TritonOps  # noqa: PLC0415

    return TritonOps()
