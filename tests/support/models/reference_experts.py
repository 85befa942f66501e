"""The experts of a GPU in the models of the CPU, with the references of their kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockyard.kernels.layers.act_mul import act_mul_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.combine_experts import combine_experts_reference
from blockyard.kernels.moe.experts_skinny import down_skinny_reference, gate_up_skinny_reference
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import grouped_linear_reference
from blockyard.kernels.moe.map_experts import ExpertMap
from blockyard.kernels.moe.routing import choose_experts
from blockyard.services.gpu_worker.layers import fused_ops
from blockyard.services.gpu_worker.layers.moe import adaptable_experts, grouped_experts
from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts
from blockyard.services.gpu_worker.quantization.dense import UnquantizedExperts


class ReferenceProduct:
    """Implements `ExpertProduct` for weights in the dtype of the model."""

    form, rounds_inputs, takes_prefill, takes_mma = "dense", False, False, False

    def __init__(self, method: UnquantizedExperts) -> None:
        self._weight, self._bias, self.device = method.weight, method.bias, method.weight.device

    def gate_up(
        self, x: Tensor, experts: Tensor, tiling: object, gate: Gate, norm: RMSNorm | None, **options: Any
    ) -> Tensor:
        options.pop("loads", None)
        return gate_up_skinny_reference(x, self._weight, experts, gate, norm=norm, bias=self._bias, **options)

    def down(self, x: Tensor, experts: Tensor, tiling: object, **options: Any) -> Tensor:
        total = down_skinny_reference(x, self._weight, experts, bias=self._bias, **options)
        added = options.get("add_to")
        return total if added is None else added.copy_(total)

    def grouped(self, x: Tensor, mapped: ExpertMap | Tensor, num_pairs: int, tiling: object, **options: Any) -> Tensor:
        options.pop("loads", None)
        experts = mapped if isinstance(mapped, Tensor) else experts_of(mapped, num_pairs)
        return grouped_linear_reference(x, self._weight, experts, bias=self._bias, **options)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the CPU that are made from here on multiply experts as a GPU does."""
    for module in (grouped_experts, adaptable_experts):
        monkeypatch.setattr(module, "map_experts", lambda experts, num, tile, load=None: map_of(experts, num))
    monkeypatch.setattr(grouped_experts, "find_product", ReferenceProduct)
    monkeypatch.setattr(grouped_experts, "combine_experts", combine_experts_reference)
    monkeypatch.setattr(grouped_experts, "route_experts", choose_on_host)
    monkeypatch.setattr(adaptable_experts, "act_mul", act_mul_reference)
    monkeypatch.setattr(fused_ops.TorchOps, "grouped_experts", lambda self, *arguments: GroupedExperts(*arguments))


def choose_on_host(
    logits: Tensor, routing: Any, bias: Tensor | None, factors: Tensor | None, places: Tensor | None
) -> tuple[Tensor, Tensor]:
    experts, weights = choose_experts(logits, routing, bias, factors)
    experts = experts if places is None else places[experts]
    return experts.int().contiguous(), weights.float().contiguous()


def map_of(experts: Tensor, num_experts: int) -> ExpertMap:
    """A map with one tile for each pair, in order."""
    assert int(experts.max()) < num_experts
    return ExpertMap(torch.arange(experts.numel(), dtype=torch.int32), experts.flatten(), 1)


def experts_of(mapped: ExpertMap, num_pairs: int) -> Tensor:
    assert len(mapped.experts) == num_pairs
    return mapped.experts
