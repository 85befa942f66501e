"""GLM-4.5 to 4.7: half of each head is rotated, the first layers are dense, the others have routed and shared experts.

The router chooses by sigmoids with a bias, among groups of experts, in float32.
"""

from typing import Annotated, Any

import msgspec
import torch

from blockyard.services.gpu_worker.layers.attention import AttentionOptions, SeparateQKV
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import FeedForward, GatedMLP
from blockyard.services.gpu_worker.layers.moe.expert_weights import separate_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import ExactRouter, RoutedExperts
from blockyard.services.gpu_worker.layers.norm import head_rms_norm
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import (
    LlamaConfig,
    LlamaVariant,
    build_llama,
    llama_mlp,
)
from blockyard.services.gpu_worker.models.moe.moe_config import check_silu, leave_out_draft_layers, make_routing
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {  # of fields that config.json may omit
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
}
OTHER_NAMES = {"num_local_experts": "n_routed_experts"}


class GlmMoeConfig(msgspec.Struct, frozen=True):
    moe_intermediate_size: bounds.Width = 1408
    num_experts_per_tok: bounds.Experts = 8
    n_routed_experts: bounds.Experts = 128
    n_shared_experts: bounds.Experts = 1
    n_group: bounds.Experts = 1
    topk_group: bounds.Experts = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0)] = 1  # layers without experts
    use_qk_norm: bool = False


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS, OTHER_NAMES)
    fields, moe = parse(config, LlamaConfig), parse(config, GlmMoeConfig)
    hidden = fields.hidden_size
    check_silu(fields.hidden_act)
    leave_out_draft_layers(config, table, fields.num_hidden_layers)
    routing = make_routing(
        "n_routed_experts",
        moe.n_routed_experts,
        moe.num_experts_per_tok,
        sigmoid=True,
        renormalize=moe.norm_topk_prob,
        scale=moe.routed_scaling_factor,
        groups=moe.n_group,
        top_groups=moe.topk_group,
        sum_of_two=True,
    )

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> FeedForward:
        if layer < moe.first_k_dense_replace:
            return llama_mlp(layers, fields, prefix)
        mlp, num_experts, inner = f"{prefix}.mlp", routing.num_experts, moe.moe_intermediate_size
        bias = table.empty(num_experts, dtype=torch.float32)
        table.place(f"{mlp}.gate.e_score_correction_bias", bias, (num_experts,))
        return RoutedExperts(
            ExactRouter(layers, f"{mlp}.gate", num_experts, hidden),
            separate_experts(layers, f"{mlp}.experts", num_experts, hidden, inner),
            routing,
            choice_bias=bias,
            shared=GatedMLP(layers, f"{mlp}.shared_experts", hidden, inner * moe.n_shared_experts),
        )

    attention = AttentionOptions(
        qkv=SeparateQKV(bias=fields.attention_bias),
        qk_norm=head_rms_norm(fields.rms_norm_eps) if moe.use_qk_norm else None,
    )
    return build_llama(config, fields, table, LlamaVariant(attention=attention, rotates_part=True, make_mlp=make_mlp))
