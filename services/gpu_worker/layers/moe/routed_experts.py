"""A mixture of experts as the feed-forward sublayer: a router, experts, and shared experts that every row has."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.gates import Gate, gated
from blockyard.kernels.moe.routing import Routing, choose_experts
from blockyard.services.gpu_worker.layers.fused_ops import find_ops, with_sums
from blockyard.services.gpu_worker.layers.linear import Linear, LinearLayers, make_spec
from blockyard.services.gpu_worker.layers.mlp import GatedMLP
from blockyard.services.gpu_worker.layers.moe.expert_matrices import ExpertMatrix, expert_specs
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertProducts, ExpertWeights
from blockyard.services.gpu_worker.layers.moe.spread_experts import SpreadExperts
from blockyard.services.gpu_worker.layers.norm import Norm
from blockyard.services.gpu_worker.loading.linear_spec import ExpertSpec, part
from blockyard.services.gpu_worker.quantization.dense import Float32Linear
from blockyard.services.gpu_worker.quantization.method import ExpertLinear, Fusion


class ExactRouter:
    """A router in float32, also in models of another dtype: x [rows, hidden] -> logits [rows, experts] float32."""

    def __init__(self, layers: LinearLayers, name: str, num_experts: int, hidden: int) -> None:
        matrix = part(name, num_experts)
        weight = layers.plain(matrix, hidden, dtype=torch.float32)
        method = Float32Linear(weight)
        self._linear = Linear(method, make_spec([matrix], hidden))
        if (product := find_ops(weight.device).exact_product(method)) is not None:
            self._linear.use({}, product)

    def linears(self) -> list[Linear]:
        return [self._linear]

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x)


class RoutedExperts:
    """Implements `FeedForward` and `PlainFeedForward`."""

    def __init__(
        self,
        router: Linear | ExactRouter,
        weights: ExpertWeights,
        routing: Routing,
        *,
        choice_bias: Tensor | None = None,
        expert_factors: Tensor | None = None,
        shared: GatedMLP | None = None,
        shared_gate: Linear | None = None,
        gate: Gate = Gate.SILU,
        scales_input: bool = False,
    ) -> None:
        """choice_bias, expert_factors [experts]: see `choose_experts`. shared_gate: its sigmoid is the weight of the
        shared experts. scales_input: routing weights multiply the input of an expert, otherwise its output."""
        self._router, self._choice_bias, self._expert_factors = router, choice_bias, expert_factors
        self._ops = with_sums(find_ops(weights.device), weights.ranks)
        self._shared, self._shared_gate = shared, shared_gate
        self._products = find_experts(weights, routing, gate, scales_input)
        self._experts, self._is_partial = self._products, weights.is_partial
        if weights.exchange is not None:
            self._experts = SpreadExperts(self._products, weights, routing)
        [self._router_linear] = router.linears() if isinstance(router, ExactRouter) else [router]
        if shared is None:  # otherwise several read the norm of the residual, and one kernel computes it for all
            self._router_linear.ask_fusion(Fusion.NORM)

    def experts(self) -> list[ExpertProducts]:
        return [self._products]

    def linears(self) -> list[Linear]:
        shared = self._shared.linears() if self._shared is not None else []
        gates = [self._shared_gate] if self._shared_gate is not None else []
        return [self._router_linear, *self._experts.linears(), *shared, *gates]

    def forward(self, residual: Tensor, delta: Tensor | None, norm: Norm) -> Tensor | None:
        if delta is None and isinstance(norm, RMSNorm) and self._fuses_norm(len(residual)):
            logits = self._ops.norm_then_linear(self._router_linear, residual, None, norm)
            return self._sum(residual, logits, None, residual, norm)
        x = self._ops.add_norm(residual, delta, norm)
        shared = None
        if self._shared is not None:
            shared = self._shared.finish(self._shared_gate_up(self._shared, x), residual)
        return self._sum(x, self._router(x), shared, residual)

    def _fuses_norm(self, rows: int) -> bool:
        """Whether both the router and the experts normalise what they read."""
        return self._router_linear.fused(rows) is not None and self._experts.fuses_norm(rows)

    def apply(self, x: Tensor) -> Tensor:
        shared = None
        if self._shared is not None:
            shared = self._shared.finish_alone(self._shared_gate_up(self._shared, x))
        return self._sum_alone(x, self._router(x), shared)

    def apply_routed(self, x: Tensor, router_input: Tensor) -> Tensor:
        """The experts alone, where the router does not read what they read: both [rows, hidden]."""
        return self._sum_alone(x, self._router(router_input), None)

    def _sum_alone(self, x: Tensor, logits: Tensor, shared: Tensor | None) -> Tensor:
        total = self._sum(x, logits, shared)
        assert total is not None  # it is added to nothing but a residual
        return total

    def _sum(
        self,
        x: Tensor,
        logits: Tensor,
        shared: Tensor | None,
        residual: Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor | None:
        experts, weights = self._experts.choose(logits, self._choice_bias, self._expert_factors)
        # a batch-invariant worker has made the router so, as every linear layer; experts on a GPU are none
        is_invariant = self._router_linear.is_batch_invariant
        residual = None if self._is_partial else residual  # other ranks' parts come first
        return self._experts.forward(x, experts, weights, shared, is_invariant, residual, norm)

    def _shared_gate_up(self, shared: GatedMLP, x: Tensor) -> Tensor:
        gate_up = shared.gate_up(x)
        if self._shared_gate is not None:  # of each row: it may multiply what `down` reads
            gate_up.chunk(2, -1)[1].mul_(_sigmoid(self._shared_gate(x)))
        return gate_up


def _sigmoid(column: Tensor) -> Tensor:
    """column [rows, 1]. torch's `sigmoid` rounds by an element's place in the tensor on the CPU, a softmax does not."""
    return F.pad(column, (0, 1)).softmax(-1)[:, :1]


class HostExperts:
    """Implements `ExpertProducts` on the CPU with linear layers, and computes chosen experts alone."""

    def __init__(self, weights: ExpertWeights, routing: Routing, gate: Gate, scales_input: bool) -> None:
        self._routing, self._gate, self._scales_input = routing, gate, scales_input
        self.places, self._num_own = weights.places, weights.num_own(routing)
        methods = weights.gate_up, weights.down
        self._numbers = [one for method in methods for one in method.numbers()]
        self._weights = [[method.linear(place) for method in methods] for place in range(self._num_own)]
        gate_up, down = weights.specs or (None, None)
        own = range(self._num_own) if self.places is None else self.places.first
        self._gate_up = _each_linear([one for one, _ in self._weights], gate_up, own)
        self._down = _each_linear([one for _, one in self._weights], down, own)
        self._load = None if weights.load is None else weights.load.watch(routing.top_k)

    def linears(self) -> list[Linear]:
        return [*self._gate_up, *self._down]

    def matrices(self) -> list[ExpertMatrix]:
        return []

    def tensors(self) -> list[Tensor]:
        return [tensor for linear in self.linears() for tensor in linear.method.tensors().values()]

    def weights_at(self, place: int) -> list[ExpertLinear]:
        return self._weights[place]

    def numbers(self) -> list[Tensor]:
        return self._numbers

    def fuses_norm(self, rows: int) -> bool:
        return False

    def choose(self, logits: Tensor, bias: Tensor | None, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return choose_experts(logits, self._routing, bias, factors)

    def forward(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        batch_invariant: bool = False,
        residual: Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor:
        """batch_invariant: not read, because `linears` then are batch-invariant themselves; nor are the last two."""
        flat, factors = experts.flatten(), weights.to(x.dtype).view(-1, 1)
        if self.places is not None:  # other ranks' experts come last, and are not computed
            flat = self.places.find(flat)
        order = flat.argsort(stable=True)
        rows = order // self._routing.top_k
        pairs = x.new_zeros(len(flat), x.shape[1])
        start, counts = 0, flat.bincount(minlength=self._num_own)[: self._num_own]
        if self._load is not None:
            self._load.copy_(counts)
        for expert, count in enumerate(counts.tolist()):
            if not count:
                continue
            own, mine = rows[start : start + count], order[start : start + count]
            start += count
            given = x[own] * factors[mine] if self._scales_input else x[own]
            with self._gate_up[expert].only(own):
                y = self._down[expert](gated(self._gate_up[expert](given), self._gate))
            pairs[mine] = y if self._scales_input else y * factors[mine]
        total = pairs.view(len(x), self._routing.top_k, x.shape[1]).sum(1)
        return total if shared is None else total.add_(shared)


def _each_linear(methods: Sequence[ExpertLinear], stored: ExpertSpec | None, experts: range) -> list[Linear]:
    specs = expert_specs(methods[0].shape, stored, experts)
    return [Linear(method, spec) for method, spec in zip(methods, specs, strict=True)]


def find_experts(weights: ExpertWeights, routing: Routing, gate: Gate, scales_input: bool) -> ExpertProducts:
    grouped = find_ops(weights.device).grouped_experts(weights, routing, gate, scales_input)
    return HostExperts(weights, routing, gate, scales_input) if grouped is None else grouped
