"""The products of a mixture's experts as Triton kernels. Imported only on a GPU."""

import math
from dataclasses import dataclass

from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.combine_experts import combine_experts
from blockyard.kernels.moe.experts_skinny import SkinnyTiling, down_skinny, gate_up_skinny
from blockyard.kernels.moe.few_rows import MAX_ROWS
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import GroupedTiling, grouped_linear
from blockyard.kernels.moe.map_experts import ExpertMap, map_experts
from blockyard.kernels.moe.route_experts import route_experts
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.expert_weights import ExpertWeights
from blockyard.services.gpu_worker.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class ExpertTilings:
    """Sizes for both products, for so many pairs an expert on average; measured on an H200 with Qwen3-30B-A3B."""

    most_pairs: float
    tile: int  # pairs of a tile
    gate_up: GroupedTiling
    down: GroupedTiling


TILINGS = (
    ExpertTilings(0.25, 16, GroupedTiling(64, 128, 4, 4), GroupedTiling(32, 128, 3, 2)),
    ExpertTilings(1, 16, GroupedTiling(64, 128, 3, 4), GroupedTiling(64, 64, 3, 4)),
    ExpertTilings(8, 16, GroupedTiling(64, 128, 3, 4), GroupedTiling(64, 128, 3, 4)),
    ExpertTilings(32, 32, GroupedTiling(128, 128, 3, 8), GroupedTiling(64, 128, 3, 4)),
    ExpertTilings(96, 64, GroupedTiling(128, 64, 3, 8), GroupedTiling(64, 64, 3, 4)),
    ExpertTilings(math.inf, 128, GroupedTiling(128, 64, 3, 8), GroupedTiling(64, 64, 3, 4)),
)
# of one or two rows, for which tensor cores wait for memory; `down` by its inputs at most, measured with experts of
# Qwen3-30B-A3B, DeepSeek-V2-Lite and gpt-oss-20b
MOST_SKINNY_ROWS = 2
GATE_UP_SKINNY = SkinnyTiling(4, 512, 4)
DOWN_SKINNY = ((1024, SkinnyTiling(8, 256, 8)), (2048, SkinnyTiling(1, 256, 2)), (4096, SkinnyTiling(4, 256, 8)))
MOST_SKINNY_PAIRS = 1 / 8  # an expert, on average, of two rows: more of them have the same expert and read it twice
MOST_ADDED_ROWS = 512  # the addends of more would take much memory until the next layer has read them
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

    def fuses_norm(self, rows: int) -> bool:
        return self._skinny(rows) is not None

    def _skinny(self, rows: int) -> tuple[SkinnyTiling, SkinnyTiling] | None:
        return pick_skinny(rows, self._routing, self._weights.down.shape[0])

    def forward(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        batch_invariant: bool = False,
        residual: Tensor | None = None,
        norm: RMSNorm | None = None,
    ) -> Tensor | None:
        skinny = self._skinny(len(x))
        if skinny is not None and not batch_invariant:
            return self._forward_skinny(x, experts, weights, shared, residual, norm, *skinny)
        assert norm is None  # see `fuses_norm`
        gate_up, down = self._weights.gate_up.grouped_weight(), self._weights.down.grouped_weight()
        num_pairs = experts.numel()
        tilings = BATCH_INVARIANT if batch_invariant else pick_tilings(num_pairs, self._routing.num_experts)
        mapped: ExpertMap | Tensor = experts
        if batch_invariant or len(x) > MAX_ROWS:
            mapped = map_experts(experts, self._routing.num_experts, tilings.tile, self._load)
        first, last = (weights, None) if self._scales_input else (None, weights)
        inner = grouped_linear(
            x,
            gate_up.weight,
            mapped,
            num_pairs,
            tilings.gate_up,
            bias=gate_up.bias,
            gate=self._gate,
            scale=first,
            scale_first=self._scales_input,
            loads=self._load,
        )
        pairs = grouped_linear(inner, down.weight, mapped, num_pairs, tilings.down, bias=down.bias, scale=last)
        if residual is not None and shared is None and not batch_invariant and len(x) <= MOST_ADDED_ROWS:
            return pairs.view(*experts.shape, pairs.shape[1])  # the kernel that adds them to the residual sums them
        return combine_experts(pairs, self._routing.top_k, shared)

    def _forward_skinny(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        residual: Tensor | None,
        norm: RMSNorm | None,
        gate_up_tiling: SkinnyTiling,
        down_tiling: SkinnyTiling,
    ) -> Tensor | None:
        gate_up, down = self._weights.gate_up.grouped_weight(), self._weights.down.grouped_weight()
        first, last = (weights, None) if self._scales_input else (None, weights)
        inner = gate_up_skinny(
            x,
            gate_up.weight,
            experts,
            gate_up_tiling,
            self._gate,
            norm=norm,
            bias=gate_up.bias,
            scale=first,
            loads=self._load,
        )
        y = down_skinny(
            inner, down.weight, experts, down_tiling, bias=down.bias, scale=last, shared=shared, add_to=residual
        )
        return y if residual is None else None


def pick_tilings(num_pairs: int, num_experts: int) -> ExpertTilings:
    return next(one for one in TILINGS if num_pairs <= one.most_pairs * num_experts)


def pick_skinny(rows: int, routing: Routing, inner: int) -> tuple[SkinnyTiling, SkinnyTiling] | None:
    """Sizes for gate and up, and for down. None: `grouped_linear` is quicker, or the kernels would be too long."""
    if rows not in range(1, MOST_SKINNY_ROWS + 1):
        return None
    if rows > 1 and rows * routing.top_k > MOST_SKINNY_PAIRS * routing.num_experts:
        return None
    down = next((tiling for most, tiling in DOWN_SKINNY if inner <= most), None)
    return None if down is None else (GATE_UP_SKINNY, down)
