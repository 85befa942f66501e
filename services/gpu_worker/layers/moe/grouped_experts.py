"""The products of a mixture's experts as Triton kernels. Imported only on a GPU."""

from collections.abc import Mapping

from torch import Tensor

from blockyard.kernels.moe.combine_experts import combine_experts
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import GroupedTiling, grouped_linear
from blockyard.kernels.moe.map_experts import map_experts
from blockyard.kernels.moe.route_experts import route_experts
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.layers.moe import expert_configs
from blockyard.services.gpu_worker.layers.moe.expert_configs import BATCH_INVARIANT, ExpertConfig, ExpertShape
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertWeights


class GroupedExperts:
    """Implements `ExpertProducts`. Nothing is read back by the host, and sizes follow from the number of rows."""

    def __init__(self, weights: ExpertWeights, routing: Routing, gate: Gate, scales_input: bool) -> None:
        self._weights, self._routing, self._gate, self._scales_input = weights, routing, gate, scales_input
        self._load = None if weights.load is None else weights.load.watch(routing.top_k)
        (hidden, _), (inner, _) = weights.gate_up.shape, weights.down.shape
        self.shape = ExpertShape(routing.num_experts, routing.top_k, hidden, inner)
        self._measured: Mapping[int, ExpertConfig] = {}

    def linears(self) -> list[Linear]:
        return []

    def use(self, measured: Mapping[int, ExpertConfig]) -> None:
        """Installs configs by number of rows."""
        self._measured = measured

    def weight(self) -> Tensor:
        """Returns the weight of the first product: its dtype and device are those of both."""
        return self._weights.gate_up.grouped_weight().weight

    def choose(self, logits: Tensor, bias: Tensor | None, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return route_experts(logits, self._routing, bias, factors)

    def forward(
        self, x: Tensor, experts: Tensor, weights: Tensor, shared: Tensor | None, batch_invariant: bool = False
    ) -> Tensor:
        config = BATCH_INVARIANT if batch_invariant else expert_configs.pick(self.shape, len(x), self._measured)
        return self.forward_with(config, x, experts, weights, shared, self._load)

    def forward_with(
        self,
        config: ExpertConfig,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        shared: Tensor | None = None,
        load: Tensor | None = None,
    ) -> Tensor:
        """As `forward`. load: where the number of pairs of each expert is stored, None: nowhere."""
        gate_up, down = self._weights.gate_up.grouped_weight(), self._weights.down.grouped_weight()
        num_pairs = experts.numel()
        mapped = map_experts(experts, self._routing.num_experts, config.tile, load)
        first, last = (weights, None) if self._scales_input else (None, weights)
        inner = grouped_linear(
            x,
            gate_up.weight,
            mapped,
            num_pairs,
            GroupedTiling(*config.gate_up),
            bias=gate_up.bias,
            gate=self._gate,
            scale=first,
            scale_first=self._scales_input,
        )
        tiling = GroupedTiling(*config.down)
        pairs = grouped_linear(inner, down.weight, mapped, num_pairs, tiling, bias=down.bias, scale=last)
        return combine_experts(pairs, self._routing.top_k, shared)
