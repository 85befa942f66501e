"""The products of a mixture's experts in steps with adapters, in one kernel each. Imported only on a GPU.

What adapters add of gate and up has to be there before the activation, so no kernel computes it with them.
"""

from collections.abc import Callable

from torch import Tensor

from blockyard.kernels.layers.act_mul import act_mul
from blockyard.kernels.lora.adapter_table import AdapterTiles
from blockyard.kernels.moe.gates import Gate, gated
from blockyard.kernels.moe.grouped_linear import GroupedTiling
from blockyard.kernels.moe.grouped_linear_prefill import PrefillTiling
from blockyard.kernels.moe.map_experts import ExpertMap, map_experts
from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertConfig
from blockyard.services.gpu_worker.layers.moe.expert_matrices import ExpertMatrix
from blockyard.services.gpu_worker.layers.moe.expert_products import ExpertProduct
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertWeights

ACTIVATIONS = {Gate.SILU: "silu", Gate.GELU_TANH: "gelu_tanh"}  # of `act_mul`


class AdaptableExperts:
    """Both products of a layer's experts, as adapters change them."""

    def __init__(
        self, weights: ExpertWeights, num_experts: int, gate: Gate, gate_up: ExpertProduct, down: ExpertProduct
    ) -> None:
        """num_experts: of this rank. gate_up, down: the products of `weights`."""
        own = range(num_experts) if weights.places is None else weights.places.first
        stored = weights.specs or (None, None)
        methods = (weights.gate_up, weights.down)
        self.matrices = [ExpertMatrix(*one, own) for one in zip(methods, stored, strict=True)]
        self._num_experts, self._gate, self._products = num_experts, gate, (gate_up, down)

    @property
    def is_active(self) -> bool:
        """Whether a row of this step has an adapter that may change experts."""
        return any(matrix.adapted is not None for matrix in self.matrices)

    def multiply(
        self,
        config: ExpertConfig,
        x: Tensor,
        experts: Tensor,
        weights: tuple[Tensor | None, Tensor | None],
        load: Tensor | None,
    ) -> Tensor:
        """x [rows, hidden], experts [rows, top_k] -> the products of all pairs, [pairs, hidden].

        config: one of `pick_unfused`. weights [rows, top_k]: of the input of an expert, and of its output; None: none
        there. load: see `LayerLoad`.
        """
        mapped = map_experts(experts, self._num_experts, config.tile, load)
        gate_up = self._pairs(0, config, x, experts, mapped, weights[0])
        activation = ACTIVATIONS.get(self._gate)
        if activation is not None:
            inner = act_mul(gate_up, activation)
        else:
            inner = gated(gate_up.float(), self._gate).to(gate_up.dtype)
        return self._pairs(1, config, inner, experts, mapped, weights[1])

    def _pairs(
        self, which: int, config: ExpertConfig, x: Tensor, experts: Tensor, mapped: ExpertMap, weights: Tensor | None
    ) -> Tensor:
        product, num_pairs, tiling = self._products[which], experts.numel(), (config.gate_up, config.down)[which]
        is_of_input = weights is not None and which == 0
        add: Callable[[Tensor], None] | None = None
        if (adapted := self.matrices[which].adapted) is not None:
            add = adapted.start(x, experts, weights, AdapterTiles(mapped.pairs, mapped.experts, mapped.tile))
        if config.kernel == "prefill":
            sizes = PrefillTiling(*tiling)
            out = product.prefill(x, mapped, num_pairs, sizes, scale=weights, scale_first=is_of_input)
        else:
            few = GroupedTiling(*tiling)
            out = product.grouped(x, mapped, num_pairs, few, scale=weights, scale_first=is_of_input)
        if add is not None:
            add(out)
        return out
