"""Qwen 1.5 and 2 mixtures of experts: Qwen 2 with experts in the place of most MLPs, and a gated shared expert."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.attention import AttentionOptions, SeparateQKV
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import FeedForward, GatedMLP
from blockyard.services.gpu_worker.layers.moe.expert_weights import separate_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import RoutedExperts
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, build_llama, llama_mlp
from blockyard.services.gpu_worker.models.llama_style.qwen2 import read_windows
from blockyard.services.gpu_worker.models.moe.moe_config import check_silu
from blockyard.services.gpu_worker.models.moe.qwen3_moe import QwenMoeConfig
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {  # of fields that config.json may omit
    "max_position_embeddings": 32768,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 16,
}


class SharedExpertConfig(msgspec.Struct, frozen=True):
    shared_expert_intermediate_size: bounds.Width = 5632
    qkv_bias: bool = True


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields = parse(config, LlamaConfig)
    fields = msgspec.structs.replace(fields, mlp_bias=False)
    moe, shared = parse(config, QwenMoeConfig), parse(config, SharedExpertConfig)
    check_silu(fields.hidden_act)
    routing, hidden = moe.routing(), fields.hidden_size

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> FeedForward:
        if not moe.has_experts(layer):
            return llama_mlp(layers, fields, prefix)
        mlp, inner = f"{prefix}.mlp", shared.shared_expert_intermediate_size
        return RoutedExperts(
            layers.make([part(f"{mlp}.gate", routing.num_experts)], hidden),
            separate_experts(layers, f"{mlp}.experts", routing.num_experts, hidden, moe.moe_intermediate_size),
            routing,
            shared=GatedMLP(layers, f"{mlp}.shared_expert", hidden, inner, weighted=True),
            shared_gate=layers.make([part(f"{mlp}.shared_expert_gate", 1)], hidden),
        )

    attention = AttentionOptions(qkv=SeparateQKV(bias=shared.qkv_bias))
    windows = read_windows(config, fields.num_hidden_layers, slides=lambda layer, most: layer % 2 == 0 and layer < most)
    return build_llama(config, fields, table, LlamaVariant(attention=attention, windows=windows, make_mlp=make_mlp))
