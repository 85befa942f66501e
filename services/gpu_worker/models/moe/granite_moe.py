"""Granite 3 mixtures of experts: Granite with experts in the place of each MLP."""

from dataclasses import replace
from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.moe.expert_weights import stacked_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import RoutedExperts
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.linear_spec import SUFFIXES, part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.granite import granite_variant
from blockyard.services.gpu_worker.models.llama_style.llama import build_llama
from blockyard.services.gpu_worker.models.moe.moe_config import check_silu, make_routing
from blockyard.shared.config import model_bounds as bounds


class GraniteMoeConfig(msgspec.Struct, frozen=True):
    num_local_experts: bounds.Experts = 8
    num_experts_per_tok: bounds.Experts = 2


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields, variant = granite_variant(config)
    moe = parse(config, GraniteMoeConfig)
    hidden, inner = fields.hidden_size, fields.intermediate_size
    check_silu(fields.hidden_act)
    routing = make_routing("num_local_experts", moe.num_local_experts, moe.num_experts_per_tok)

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> RoutedExperts:
        mlp = f"{prefix}.block_sparse_moe"
        gate_up, down = f"{mlp}.input_linear", f"{mlp}.output_linear"
        return RoutedExperts(
            layers.make([part(f"{mlp}.router.layer", routing.num_experts)], hidden),
            stacked_experts(layers, gate_up, down, routing.num_experts, hidden, inner, suffixes=SUFFIXES),
            routing,
        )

    return build_llama(config, fields, table, replace(variant, make_mlp=make_mlp))
