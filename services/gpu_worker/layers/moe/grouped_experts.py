"""The products of a mixture's experts as Triton kernels. Imported only on a GPU.

Each product has the kernels of its weight's form (`expert_products`). No weight is dequantized in memory.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.combine_experts import combine_experts
from blockyard.kernels.moe.experts_skinny import SkinnyTiling
from blockyard.kernels.moe.few_rows import MAX_ROWS
from blockyard.kernels.moe.four_bits.mma_form import MmaTiling
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import GroupedTiling
from blockyard.kernels.moe.grouped_linear_prefill import PrefillTiling
from blockyard.kernels.moe.map_experts import ExpertMap, map_experts
from blockyard.kernels.moe.route_experts import route_experts
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.moe import expert_configs
from blockyard.services.gpu_worker.layers.moe.adaptable_experts import AdaptableExperts
from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertConfig, ExpertShape
from blockyard.services.gpu_worker.layers.moe.expert_matrices import ExpertMatrix
from blockyard.services.gpu_worker.layers.moe.expert_products import find_product
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertWeights
from blockyard.services.gpu_worker.quantization.method import ExpertLinear

MOST_ADDED_ROWS = 512  # the addends of more would take much memory until the next layer has read them


class GroupedExperts:
    """Implements `ExpertProducts`. Nothing is read back by the host, and sizes follow from the number of rows."""

    def __init__(self, weights: ExpertWeights, routing: Routing, gate: Gate, scales_input: bool) -> None:
        self._routing, self._gate, self._scales_input = routing, gate, scales_input
        self._load = None if weights.load is None else weights.load.watch(routing.top_k)
        (hidden, _), (inner, _) = weights.gate_up.shape, weights.down.shape
        self._gate_up, self._down = find_product(weights.gate_up), find_product(weights.down)
        both = (self._gate_up, self._down)
        self._tensors, self.device, self.dtype = weights.tensors(), weights.device, weights.gate_up.dtype
        self.size_bytes = weights.gate_up.size_bytes + weights.down.size_bytes
        self.is_on_device = all(one.device.type == self.device.type for one in both)  # not in host memory
        takes_prefill = self.is_on_device and all(one.takes_prefill for one in both)  # TMA cannot read host memory
        form = " ".join(dict.fromkeys(one.form for one in both))
        self.places, self._num_own = weights.places, weights.num_own(routing)
        # of the kernel that chooses experts; None: other replicas compute the rows, too, or choices are counted
        self._table: Tensor | None = None
        if self.places is not None and weights.exchange is None and not self.places.counts:
            self._table = self.places.table
        self._adaptable = AdaptableExperts(weights, self._num_own, gate, *both)
        self._methods = weights.gate_up, weights.down
        self._numbers = [one for method in self._methods for one in method.numbers()]
        takes_mma = self.is_on_device and all(one.takes_mma for one in both)
        rounds = any(one.rounds_inputs for one in both)
        self.shape = ExpertShape(self._num_own, routing.top_k, hidden, inner, takes_prefill, form, takes_mma, rounds)
        self._measured: Mapping[int, ExpertConfig] = {}
        self._invariant = expert_configs.batch_invariant(self.shape)

    def linears(self) -> list[Linear]:
        return []

    def matrices(self) -> list[ExpertMatrix]:
        return self._adaptable.matrices

    def tensors(self) -> list[Tensor]:
        return self._tensors

    def weights_at(self, place: int) -> list[ExpertLinear]:
        return [method.linear(place) for method in self._methods]

    def numbers(self) -> list[Tensor]:
        return self._numbers

    def use(self, measured: Mapping[int, ExpertConfig]) -> None:
        """Installs configs by number of rows."""
        self._measured = measured

    def choose(self, logits: Tensor, bias: Tensor | None, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return route_experts(logits, self._routing, bias, factors, self._table)

    def fuses_norm(self, rows: int) -> bool:
        config = self._config(rows)
        if self._adaptable.is_active:
            return False
        if config.kernel == "skinny":
            return self._gate_up.takes_norm(SkinnyTiling(*config.gate_up).in_tile)
        return config.kernel == "mma_sums" and self.places is None and self.dtype == torch.bfloat16

    def _config(self, rows: int) -> ExpertConfig:
        return expert_configs.pick(self.shape, rows, self._measured)

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
        if self.places is not None and self._table is None:
            experts = self.places.find(experts)
        if self._adaptable.is_active:
            config = self._invariant
            if not batch_invariant:
                config = expert_configs.pick_unfused(self.shape, len(x), self._measured)
            pairs = self._adaptable.multiply(config, x, experts, self._scales(weights), self._load)
            return self._combine(pairs, experts, shared)
        config = self._invariant if batch_invariant else self._config(len(x))
        return self._forward(config, x, experts, weights, shared, self._load, residual, norm)

    def forward_with(
        self, config: ExpertConfig, x: Tensor, experts: Tensor, weights: Tensor, residual: Tensor | None = None
    ) -> Tensor | None:
        """Computes `forward` with this config, without counting how often experts are chosen."""
        return self._forward(config, x, experts, weights, None, None, residual, None)

    def _forward(
        self,
        config: ExpertConfig,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        load: Tensor | None,
        residual: Tensor | None,
        norm: RMSNorm | None,
    ) -> Tensor | None:
        """load: see `LayerLoad`; None: not counted."""
        if config.kernel == "mma_sums" and self.places is None:  # a row's experts are different ones
            total = self._sum_mma(config, x, experts, weights, shared, load, residual, norm)
            return total if residual is None else None
        if config.kernel == "skinny":
            total = self._sum_skinny(config, x, experts, weights, shared, load, residual, norm)
            return total if residual is None else None
        assert norm is None  # see `fuses_norm`
        pairs = self._multiply(config, x, experts, weights, load)
        if residual is not None and shared is None and config is not self._invariant and len(x) <= MOST_ADDED_ROWS:
            return pairs.view(*experts.shape, pairs.shape[1])  # the kernel that adds them to the residual sums them
        return self._combine(pairs, experts, shared)

    def _combine(self, pairs: Tensor, experts: Tensor, shared: Tensor | None) -> Tensor:
        if self.places is not None:
            return combine_experts(pairs, self._routing.top_k, shared, experts, self._num_own)
        return combine_experts(pairs, self._routing.top_k, shared)

    def _sum_skinny(
        self,
        config: ExpertConfig,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        load: Tensor | None,
        residual: Tensor | None,
        norm: RMSNorm | None,
    ) -> Tensor:
        """Returns the sum of each row's experts, which is the residual if there is one."""
        first, last = self._scales(weights)
        tiling = SkinnyTiling(*config.gate_up)
        inner = self._gate_up.gate_up(x, experts, tiling, self._gate, norm, scale=first, loads=load)
        tiling = SkinnyTiling(*config.down)
        return self._down.down(inner, experts, tiling, scale=last, shared=shared, add_to=residual)

    def _sum_mma(
        self,
        config: ExpertConfig,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Tensor | None,
        load: Tensor | None,
        residual: Tensor | None,
        norm: RMSNorm | None,
    ) -> Tensor:
        """As `_sum_skinny`."""
        first, last = self._scales(weights)
        inner = self._gate_up.mma(
            x,
            experts,
            experts.numel(),
            MmaTiling(*config.gate_up),
            norm=norm,
            gate=self._gate,
            scale=first,
            scale_first=self._scales_input,
            loads=load,
        )
        tiling = MmaTiling(*config.down)
        return self._down.row_sums(inner, experts, tiling, scale=last, shared=shared, add_to=residual)

    def _multiply(
        self, config: ExpertConfig, x: Tensor, experts: Tensor, weights: Tensor, load: Tensor | None
    ) -> Tensor:
        """Returns the products of all pairs, [pairs, hidden]."""
        num_pairs, num_experts = experts.numel(), self._num_own
        if config.kernel == "prefill":
            mapped = map_experts(experts, num_experts, config.tile, load)
            return self._multiply_many(config, x, mapped, num_pairs, weights)
        if len(x) > MAX_ROWS or config is self._invariant or self.places is not None:
            mapped = map_experts(experts, num_experts, config.tile, load)
            return self._multiply_few(config, x, mapped, num_pairs, weights)
        return self._multiply_few(config, x, experts, num_pairs, weights, load)

    def _multiply_few(
        self,
        config: ExpertConfig,
        x: Tensor,
        mapped: ExpertMap | Tensor,
        num_pairs: int,
        weights: Tensor,
        load: Tensor | None = None,
    ) -> Tensor:
        """mapped: of the pairs, or their experts, of which the first product then counts how often they are chosen."""
        first, last = self._scales(weights)
        options = {"gate": self._gate, "scale": first, "scale_first": self._scales_input, "loads": load}
        if config.kernel == "grouped":
            tiling = GroupedTiling(*config.gate_up)
            inner = self._gate_up.grouped(x, mapped, num_pairs, tiling, **options)
            return self._down.grouped(inner, mapped, num_pairs, GroupedTiling(*config.down), scale=last)
        inner = self._gate_up.mma(x, mapped, num_pairs, MmaTiling(*config.gate_up), **options)
        return self._down.mma(inner, mapped, num_pairs, MmaTiling(*config.down), scale=last)

    def _multiply_many(
        self, config: ExpertConfig, x: Tensor, mapped: ExpertMap, num_pairs: int, weights: Tensor
    ) -> Tensor:
        """Pairs between both products are in the order of the map."""
        first, last = self._scales(weights)
        inner = self._gate_up.prefill(
            x,
            mapped,
            num_pairs,
            PrefillTiling(*config.gate_up),
            gate=self._gate,
            scale=first,
            scale_first=self._scales_input,
            sorted_out=True,
        )
        return self._down.prefill(inner, mapped, num_pairs, PrefillTiling(*config.down), scale=last, sorted_in=True)

    def _scales(self, weights: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The routing weights, for the product that they multiply: the first or the last one."""
        return (weights, None) if self._scales_input else (None, weights)
