"""The products of a mixture's experts as Triton kernels. Imported only on a GPU."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockyard.kernels.moe.combine_experts import combine_experts
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import GroupedTiling, grouped_linear
from blockyard.kernels.moe.grouped_linear_prefill import TILE, PrefillTiling, fits, grouped_linear_prefill
from blockyard.kernels.moe.map_experts import ExpertMap, map_experts
from blockyard.kernels.moe.route_experts import route_experts
from blockyard.kernels.moe.router_linear import MOST_TILES, router_linear, takes
from blockyard.kernels.moe.routing import Routing
from blockyard.kernels.programmatic_launch import supports_pdl
from blockyard.services.gpu_worker.layers.expert_weights import ExpertWeights
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.linear_method import LinearMethod


@dataclass(frozen=True, slots=True)
class ExpertTilings:
    """Sizes for both products, for so many pairs an expert on average; measured on an H200 with Qwen3-30B-A3B."""

    most_pairs: float
    tile: int  # pairs of a tile
    gate_up: GroupedTiling
    down: GroupedTiling


TILINGS = (
    ExpertTilings(0.25, 16, GroupedTiling(64, 128, 4, 4), GroupedTiling(32, 128, 3, 2)),
    ExpertTilings(8, 16, GroupedTiling(64, 128, 3, 4), GroupedTiling(64, 128, 3, 4)),
    ExpertTilings(32, 32, GroupedTiling(128, 128, 3, 8), GroupedTiling(64, 128, 3, 4)),
    ExpertTilings(96, 64, GroupedTiling(128, 64, 3, 8), GroupedTiling(64, 64, 3, 4)),
    ExpertTilings(math.inf, 128, GroupedTiling(128, 64, 3, 8), GroupedTiling(64, 64, 3, 4)),
)


FEWEST_PREFILL_PAIRS = 32  # of an expert on average, from which `grouped_linear_prefill` is quicker
# Measured on an H200 with the shapes of four models; groups of tiles help where rows of weights have 2,048 inputs.
PREFILL_GATE_UP = PrefillTiling(out_tile=128, in_tile=64, stages=4, warps=8)
PREFILL_GATE_UP_2048 = replace(PREFILL_GATE_UP, group=4)
PREFILL_DOWN = PrefillTiling(out_tile=256, in_tile=64, stages=4, warps=8)
BATCH_INVARIANT = ExpertTilings(math.inf, 32, GroupedTiling(128, 128, 3, 8), GroupedTiling(64, 128, 3, 4))


class GroupedExperts:
    """Implements `ExpertProducts`. Nothing is read back by the host, and sizes follow from the number of rows."""

    def __init__(self, weights: ExpertWeights, routing: Routing, gate: Gate, scales_input: bool) -> None:
        self._weights, self._routing, self._gate, self._scales_input = weights, routing, gate, scales_input
        self._load = None if weights.load is None else weights.load.watch(routing.top_k)

    def linears(self) -> list[Linear]:
        return []

    def choose(self, logits: Tensor, bias: Tensor | None, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return route_experts(logits, self._routing, bias, factors)

    def forward(
        self, x: Tensor, experts: Tensor, weights: Tensor, shared: Tensor | None, batch_invariant: bool = False
    ) -> Tensor:
        num_pairs, num_experts = experts.numel(), self._routing.num_experts
        first, last = (weights, None) if self._scales_input else (None, weights)
        if not batch_invariant and takes_prefill(num_pairs, num_experts, self._weights):
            mapped = map_experts(experts, num_experts, TILE, self._load)
            pairs = self._multiply_many(x, mapped, num_pairs, first, last)
        else:
            tilings = BATCH_INVARIANT if batch_invariant else pick_tilings(num_pairs, num_experts)
            mapped = map_experts(experts, num_experts, tilings.tile, self._load)
            pairs = self._multiply(x, mapped, num_pairs, tilings, first, last)
        return combine_experts(pairs, self._routing.top_k, shared)

    def _multiply(
        self,
        x: Tensor,
        mapped: ExpertMap,
        num_pairs: int,
        tilings: ExpertTilings,
        first: Tensor | None,
        last: Tensor | None,
    ) -> Tensor:
        """first, last: the routing weights, where the first or the last product takes them."""
        own = self._weights
        inner = grouped_linear(
            x,
            own.gate_up,
            mapped,
            num_pairs,
            tilings.gate_up,
            bias=own.gate_up_bias,
            gate=self._gate,
            scale=first,
            scale_first=self._scales_input,
        )
        return grouped_linear(inner, own.down, mapped, num_pairs, tilings.down, bias=own.down_bias, scale=last)

    def _multiply_many(
        self,
        x: Tensor,
        mapped: ExpertMap,
        num_pairs: int,
        first: Tensor | None,
        last: Tensor | None,
    ) -> Tensor:
        """As `_multiply`. Pairs between both products are in the order of the map."""
        own = self._weights
        inner = grouped_linear_prefill(
            x,
            own.gate_up,
            mapped,
            num_pairs,
            PREFILL_GATE_UP_2048 if x.shape[1] == 2048 else PREFILL_GATE_UP,
            bias=own.gate_up_bias,
            gate=self._gate,
            scale=first,
            scale_first=self._scales_input,
            sorted_out=True,
        )
        return grouped_linear_prefill(
            inner, own.down, mapped, num_pairs, PREFILL_DOWN, bias=own.down_bias, scale=last, sorted_in=True
        )


class ExactProduct:
    """The product of a router in float32 by its own kernel: x [rows, hidden] -> logits [rows, experts] float32."""

    def __init__(self, method: LinearMethod, device: torch.device) -> None:
        """method: its `apply` computes rows that the kernel does not take."""
        self._method, self._pdl = method, supports_pdl(device)
        self._arrived = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        if not takes(x):
            return self._method.apply(x)
        return router_linear(x, self._method.tensors()["weight"], self._arrived, pdl=self._pdl)


def pick_tilings(num_pairs: int, num_experts: int) -> ExpertTilings:
    return next(one for one in TILINGS if num_pairs <= one.most_pairs * num_experts)


def takes_prefill(num_pairs: int, num_experts: int, weights: ExpertWeights) -> bool:
    """Whether `grouped_linear_prefill` multiplies so many pairs by these weights; otherwise `grouped_linear` does."""
    many = num_pairs >= FEWEST_PREFILL_PAIRS * num_experts
    return many and fits(weights.gate_up) and fits(weights.down)
