"""Mixtral: Mistral with eight experts in the place of each MLP, of which a row has two."""

from typing import Any

import msgspec

from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.moe.expert_weights import separate_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import RoutedExperts
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, build_llama
from blockyard.services.gpu_worker.models.moe.moe_config import check_silu, make_routing
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {  # of fields that config.json may omit
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
}
OTHER_NAMES = {"num_experts": "num_local_experts"}


class MixtralConfig(msgspec.Struct, frozen=True):
    num_local_experts: bounds.Experts = 8
    num_experts_per_tok: bounds.Experts = 2
    sliding_window: bounds.Window | None = None


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS, OTHER_NAMES)
    fields, moe = parse(config, LlamaConfig), parse(config, MixtralConfig)
    check_silu(fields.hidden_act)
    routing = make_routing("num_local_experts", moe.num_local_experts, moe.num_experts_per_tok)

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> RoutedExperts:
        return _experts(layers, f"{prefix}.block_sparse_moe", fields, routing)

    windows = (moe.sliding_window or None,) * fields.num_hidden_layers
    return build_llama(config, fields, table, LlamaVariant(windows=windows, make_mlp=make_mlp))


def _experts(layers: LinearLayers, prefix: str, fields: LlamaConfig, routing: Routing) -> RoutedExperts:
    hidden, inner, names = fields.hidden_size, fields.intermediate_size, ("w1", "w3", "w2")
    return RoutedExperts(
        layers.make([part(f"{prefix}.gate", routing.num_experts)], hidden),
        separate_experts(layers, f"{prefix}.experts", routing.num_experts, hidden, inner, names),
        routing,
    )
