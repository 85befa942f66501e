"""OLMoE: Llama with experts in the place of each MLP, and RMSNorms over all heads of q and of k."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.attention import AttentionOptions, SeparateQKV
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.moe.expert_weights import separate_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import RoutedExperts
from blockyard.services.gpu_worker.layers.norm import whole_rms_norm
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, build_llama
from blockyard.services.gpu_worker.models.moe.moe_config import check_silu, make_routing
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}  # of fields that config.json may omit


OTHER_NAMES = {"num_local_experts": "num_experts"}


class OlmoeConfig(msgspec.Struct, frozen=True):
    num_experts: bounds.Experts = 64
    num_experts_per_tok: bounds.Experts = 8
    norm_topk_prob: bool = False
    clip_qkv: float | None = None


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS, OTHER_NAMES)
    fields, moe = parse(config, LlamaConfig), parse(config, OlmoeConfig)
    if moe.clip_qkv is not None:
        raise ConfigError(f"config.json: clip_qkv {moe.clip_qkv}: q, k and v with bounds are not supported")
    hidden, inner = fields.hidden_size, fields.intermediate_size
    check_silu(fields.hidden_act)
    routing = make_routing("num_experts", moe.num_experts, moe.num_experts_per_tok, renormalize=moe.norm_topk_prob)

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> RoutedExperts:
        return RoutedExperts(
            layers.make([part(f"{prefix}.mlp.gate", routing.num_experts)], hidden),
            separate_experts(layers, f"{prefix}.mlp.experts", routing.num_experts, hidden, inner),
            routing,
        )

    bias = fields.attention_bias
    attention = AttentionOptions(qkv=SeparateQKV(bias=bias), out_bias=bias, qk_norm=whole_rms_norm(fields.rms_norm_eps))
    return build_llama(config, fields, table, LlamaVariant(attention=attention, make_mlp=make_mlp))
