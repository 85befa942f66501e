"""The operations between the matrix products of a decoder, as Triton kernels. Imported only on a GPU."""

from torch import Tensor

from blockyard.kernels.layers.add_rms_norm import add_rms_norm
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.layers.silu_mul import silu_mul
from blockyard.services.gpu_worker.layers.activations import gate
from blockyard.services.gpu_worker.layers.linear import Fusion, Linear


class TritonOps:
    """Implements `FusedOps`. Uses a fused kernel if the tuner has installed one for the number of rows."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        return add_rms_norm(residual, delta, norm.weight, norm.eps)

    def norm_then_linear(self, linear: Linear, residual: Tensor, delta: Tensor | None, norm: RMSNorm) -> Tensor:
        fused = linear.fused(len(residual))
        if fused is not None and delta is None:
            return fused(residual, norm=norm)
        return linear(self.add_norm(residual, delta, norm))

    def linear_then_add(
        self, linear: Linear, x: Tensor, residual: Tensor, gate_activation: str | None = None
    ) -> Tensor | None:
        fused = linear.fused(len(x))
        is_gated = fused is not None and linear.fusion is Fusion.GATED_ADD
        if gate_activation is not None and not is_gated:
            x = silu_mul(x) if gate_activation == "silu" else gate(x, gate_activation)
        if fused is None:
            return linear(x)
        fused(x, gated=is_gated, add_to=residual)
        return None
