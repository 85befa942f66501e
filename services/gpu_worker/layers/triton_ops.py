"""The operations between the matrix products of a decoder, as Triton kernels. Imported only on a GPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from blockyard.kernels.layers.act_mul import act_mul, act_mul_rounded
from blockyard.kernels.layers.add_layer_norm import add_layer_norm
from blockyard.kernels.layers.add_rms_norm import add_rms_norm, add_rms_norm_rounded
from blockyard.kernels.layers.norm_add_norm import MOST_NORMS, norm_add_norm
from blockyard.kernels.layers.norm_heads import norm_heads
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.layers.rotate_halves import rotate_halves
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.linear import Linear, Product
from blockyard.services.gpu_worker.layers.moe.exact_product import ExactProduct
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts, ExpertWeights
from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts
from blockyard.services.gpu_worker.layers.norm import LayerNorm, Norm
from blockyard.services.gpu_worker.quantization.dense import Float32Linear
from blockyard.services.gpu_worker.quantization.method import Fusion


class TritonOps:
    """Implements `FusedOps`. Uses a fused kernel if the tuner has installed one for the number of rows."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        if isinstance(norm, RMSNorm):
            return add_rms_norm(residual, delta, norm.weight, norm.eps)
        if delta is None:
            return norm(residual)
        delta = delta if delta.dim() == 2 else delta.sum(1)
        if isinstance(norm, LayerNorm):
            return add_layer_norm(residual, delta, norm.weight, norm.bias, norm.eps)
        return norm(residual.add_(delta))

    def norm_of_sum(self, residual: Tensor, delta: Tensor, norm: Norm) -> Tensor:
        if isinstance(norm, LayerNorm):
            return add_layer_norm(residual, delta, norm.weight, norm.bias, norm.eps, keeps_sum=False)
        return self.add_norm(delta, residual, norm)

    def sum_norm(self, residual: Tensor, delta: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(residual)
        return total, add_rms_norm(residual, delta, norm.weight, norm.eps, total)

    def norm_heads(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return norm_heads(x, norm.weight, norm.eps)

    def norm_then_linear(self, linear: Linear, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        if delta is None and isinstance(norm, RMSNorm):
            fused = linear.fused(len(residual))
            if fused is not None:
                return fused(residual, norm=norm)
        if (rounding := linear.step_rounding) is not None and isinstance(norm, RMSNorm):
            return linear.of_rounded(add_rms_norm_rounded(residual, delta, norm.weight, norm.eps, rounding))
        return linear(self.add_norm(residual, delta, norm))

    def add_normed(
        self,
        residual: Tensor,
        x: Tensor,
        norm: Norm,
        then: Sequence[Norm] = (),
        *,
        beside: tuple[Norm, Tensor, Norm] | None = None,
        factor: Tensor | None = None,
    ) -> list[Tensor]:
        fused = _alike([norm] if beside is None else [norm, beside[0], beside[2]])
        if fused is None:
            return self._add_normed(residual, x, norm, then, beside, factor)
        weights = [one.weight for one in fused]
        both = None if beside is None else (weights[1], beside[1], weights[2])
        behind = _alike([norm, *then]) if len(then) <= MOST_NORMS else None
        normed = [one.weight for one in behind[1:]] if behind is not None else []
        out = norm_add_norm(residual, x, weights[0], fused[0].eps, normed, beside=both, factor=factor)
        return out if behind is not None else [self.add_norm(residual, None, one) for one in then]

    def _add_normed(
        self,
        residual: Tensor,
        x: Tensor,
        norm: Norm,
        then: Sequence[Norm],
        beside: tuple[Norm, Tensor, Norm] | None,
        factor: Tensor | None,
    ) -> list[Tensor]:
        if beside is not None:
            own, y, of_y = beside
            x = self.add_norm(x, None, own).add_(self.add_norm(y, None, of_y))
        residual.add_(self.add_norm(x, None, norm))
        if factor is not None:
            residual.mul_(factor)
        return [self.add_norm(residual, None, one) for one in then]

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        return act_mul(gate_up, activation)

    def linear_then_add(
        self, linear: Linear, x: Tensor, residual: Tensor, gate_activation: str | None = None
    ) -> Tensor | None:
        fused = linear.fused(len(x))
        is_gated = fused is not None and linear.fusion is Fusion.GATED_ADD
        if gate_activation is not None and not is_gated:
            if fused is None and (rounding := linear.step_rounding) is not None:
                return linear.of_rounded(act_mul_rounded(x, gate_activation, rounding))
            x = act_mul(x, gate_activation)
        if fused is None:
            return linear(x)
        fused(x, gated=is_gated, add_to=residual)
        return None

    def rotate_halves(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
        return rotate_halves(q, k, cos, sin, in_place)

    def exact_product(self, method: Float32Linear) -> Product | None:
        return ExactProduct(method, method.weight.device)

    def grouped_experts(
        self, weights: ExpertWeights, routing: Routing, gate: Gate, scales_input: bool
    ) -> ExpertProducts | None:
        return GroupedExperts(weights, routing, gate, scales_input)


def _alike(norms: Sequence[Norm]) -> list[RMSNorm] | None:
    """Returns norms that one kernel computes: RMSNorms with the same epsilon. Otherwise None."""
    found = [norm for norm in norms if isinstance(norm, RMSNorm)]
    return found if len(found) == len(norms) and len({norm.eps for norm in found}) == 1 else None
