"""The operations between the matrix products of a decoder: an interface, and its implementation in torch."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from blockyard.kernels.layers.apply_rope import rotate_halves_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.activations import gate
from blockyard.services.gpu_worker.layers.linear import Linear, Product
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts, ExpertWeights
from blockyard.services.gpu_worker.layers.norm import Norm
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.quantization.dense import Float32Linear


class FusedOps(Protocol):
    """Residual additions, norms and gates, which some kernels compute together with a matrix product.

    It also makes the products for which only some devices have kernels.
    """

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Adds delta to residual [rows, hidden] in place. Returns the norm of the sum.

        delta is [rows, hidden], or of experts [rows, top_k, hidden], of which the sum is added.
        """

    def norm_of_sum(self, residual: Tensor, delta: Tensor, norm: Norm) -> Tensor:
        """Returns the norm of residual + delta, both [rows, hidden], where the sum itself has no other use. May write
        to delta."""

    def sum_norm(self, residual: Tensor, delta: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Computes residual + delta, both [rows, hidden], in a new tensor, and its norm."""

    def norm_heads(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Computes the norm of x [rows, heads, head_dim] in a new tensor. Rows and heads may be strided."""

    def norm_then_linear(self, linear: Linear, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        """Computes linear(add_norm(residual, delta, norm))."""

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
        """Makes residual [rows, hidden] (residual + norm(x)) * factor [1], in place.

        Returns the new residual's norm by each of `then`. beside: (own, y, of_y): `norm` reads own(x) + of_y(y) instead
        of x. May write to x.
        """

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        """Computes activation(gate) * up of gate and up side by side. May write to gate_up."""

    def linear_then_add(
        self, linear: Linear, x: Tensor, residual: Tensor, gate_activation: str | None = None
    ) -> Tensor | None:
        """Computes linear(x). Returns it for the caller to add to residual, or None if it is already added.

        gate_activation: x is gate and up side by side, and the input of linear is activation(gate) * up.
        May write to x.
        """

    def rotate_halves(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
        """Rotates q and k [1, heads, tokens, head_dim] by cos and sin [1, tokens, rotary_dim] of the same dtype.

        The two halves of the first rotary_dim numbers of a head are paired. Returns q and k themselves if `in_place`.
        """

    def exact_product(self, method: Float32Linear) -> Product | None:
        """Returns a product of rows in float32 with the weight of `method`; None: `method` has the quickest."""

    def grouped_experts(
        self, weights: ExpertWeights, routing: Routing, gate: Gate, scales_input: bool
    ) -> ExpertProducts | None:
        """Returns the products of all chosen experts at once; None: the device computes expert by expert."""


class TorchOps:
    """Implements `FusedOps` with torch operations, for the CPU."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        if delta is not None:
            residual.add_(delta if delta.dim() == 2 else delta.sum(1))
        return norm(residual)

    def norm_of_sum(self, residual: Tensor, delta: Tensor, norm: Norm) -> Tensor:
        return norm(delta.add_(residual))

    def sum_norm(self, residual: Tensor, delta: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        total = residual + delta
        return total, norm(total)

    def norm_heads(self, x: Tensor, norm: RMSNorm) -> Tensor:
        return norm(x)

    def norm_then_linear(self, linear: Linear, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
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
        if beside is not None:
            own, y, of_y = beside
            x = own(x).add_(of_y(y))
        residual.add_(norm(x))
        if factor is not None:
            residual.mul_(factor)
        return [one(residual) for one in then]

    def act_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        return gate(gate_up, activation)

    def linear_then_add(
        self, linear: Linear, x: Tensor, residual: Tensor, gate_activation: str | None = None
    ) -> Tensor | None:
        return linear(x if gate_activation is None else gate(x, gate_activation))

    def rotate_halves(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
        turned_q, turned_k = rotate_halves_reference(q, cos, sin), rotate_halves_reference(k, cos, sin)
        return (q.copy_(turned_q), k.copy_(turned_k)) if in_place else (turned_q, turned_k)

    def exact_product(self, method: Float32Linear) -> Product | None:
        return None

    def grouped_experts(
        self, weights: ExpertWeights, routing: Routing, gate: Gate, scales_input: bool
    ) -> ExpertProducts | None:
        return None


def _triton_ops() -> FusedOps:
    # imports Triton, which is installed only on machines with a GPU
    from blockyard.services.gpu_worker.layers.triton_ops import TritonOps  # noqa: PLC0415

    return TritonOps()


OPS: dict[str, Callable[[], FusedOps]] = {"cuda": _triton_ops}  # by type of device; others have `TorchOps`


def find_ops(device: torch.device) -> FusedOps:
    """Returns the operations of a device. Each layer that needs some calls it once, when it is made."""
    return OPS.get(device.type, TorchOps)()


def ops_of(table: WeightTable) -> FusedOps:
    """Returns the operations of a model's device. They add partial sums of all ranks first, if there are several."""
    return with_sums(find_ops(table.device), table.ranks)


def with_sums(ops: FusedOps, ranks: RankGroup | None) -> FusedOps:
    """ranks: None if there is one."""
    return ops if ranks is None else SummedOps(ops, ranks)


class SummedOps:
    """Implements `FusedOps` for a rank: the output of a sublayer is a part of a sum."""

    def __init__(self, ops: FusedOps, ranks: RankGroup) -> None:
        self._ops, self._ranks = ops, ranks
        self.norm_heads, self.act_mul, self.rotate_halves = ops.norm_heads, ops.act_mul, ops.rotate_halves
        self.exact_product, self.grouped_experts = ops.exact_product, ops.grouped_experts

    def add_norm(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        part = _joined(delta)
        normed = self._sum_and_norm(residual, part, norm)
        return self._ops.add_norm(residual, self._sum(part), norm) if normed is None else normed

    def norm_of_sum(self, residual: Tensor, delta: Tensor, norm: Norm) -> Tensor:
        return self._ops.norm_of_sum(residual, self._ranks.sum(delta), norm)

    def sum_norm(self, residual: Tensor, delta: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        total = torch.empty_like(residual)
        normed = self._ranks.sum_add_rms_norm(delta, residual, norm.weight, norm.eps, total)
        return self._ops.sum_norm(residual, self._ranks.sum(delta), norm) if normed is None else (total, normed)

    def norm_then_linear(self, linear: Linear, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor:
        part = _joined(delta)
        if linear.step_rounding is None:  # otherwise one kernel adds, normalises and rounds
            normed = self._sum_and_norm(residual, part, norm)
            if normed is not None:
                return linear(normed)
        return self._ops.norm_then_linear(linear, residual, self._sum(part), norm)

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
        if beside is None:
            return self._ops.add_normed(residual, self._ranks.sum(x), norm, then, factor=factor)
        own, y, of_y = beside
        x, y = self._ranks.sum(torch.stack((x, y))).unbind()
        return self._ops.add_normed(residual, x, norm, then, beside=(own, y, of_y), factor=factor)

    def linear_then_add(
        self, linear: Linear, x: Tensor, residual: Tensor, gate_activation: str | None = None
    ) -> Tensor | None:
        assert linear.is_partial  # so no kernel adds it to the residual
        return self._ops.linear_then_add(linear, x, residual, gate_activation)

    def _sum(self, part: Tensor | None) -> Tensor | None:
        return None if part is None else self._ranks.sum(part)

    def _sum_and_norm(self, residual: Tensor, part: Tensor | None, norm: Norm) -> Tensor | None:
        """Computes `add_norm` in one kernel. None: there is none that is quicker than several."""
        if part is None or not isinstance(norm, RMSNorm):
            return None
        return self._ranks.sum_add_rms_norm(part, residual, norm.weight, norm.eps)


def _joined(delta: Tensor | None) -> Tensor | None:
    """The part [rows, hidden] of a sublayer, whose experts [rows, top_k, hidden] are added."""
    return delta if delta is None or delta.dim() == 2 else delta.sum(1)
