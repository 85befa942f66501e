"""MiniMax-M2: experts in each layer, chosen by sigmoids with a bias; half of each head is rotated; q and k are
normalised over all their heads."""

from typing import Any

import msgspec
import torch

from blockyard.services.gpu_worker.layers.attention import AttentionOptions
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.moe.expert_weights import separate_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import RoutedExperts
from blockyard.services.gpu_worker.layers.norm import whole_rms_norm
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import (
    LlamaConfig,
    LlamaVariant,
    build_llama,
    head_size,
)
from blockyard.services.gpu_worker.models.moe.moe_config import check_silu, leave_out_draft_layers, make_routing
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {  # of fields that config.json may omit
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "num_key_value_heads": 8,
    "rope_theta": 5000000.0,
}
OTHER_NAMES = {"num_experts": "num_local_experts"}


class MiniMaxM2Config(msgspec.Struct, frozen=True):
    num_local_experts: bounds.Experts = 256
    num_experts_per_tok: bounds.Experts = 8
    rotary_dim: bounds.HeadSize | None = None  # numbers of a head that are rotated; None: all


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS, OTHER_NAMES)
    fields, moe = parse(config, LlamaConfig), parse(config, MiniMaxM2Config)
    hidden, inner = fields.hidden_size, fields.intermediate_size
    check_silu(fields.hidden_act)
    leave_out_draft_layers(config, table, fields.num_hidden_layers)
    routing = make_routing("num_local_experts", moe.num_local_experts, moe.num_experts_per_tok, sigmoid=True)

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> RoutedExperts:
        mlp, num_experts = f"{prefix}.block_sparse_moe", routing.num_experts
        bias = table.empty(num_experts, dtype=torch.float32)
        table.place(f"{mlp}.e_score_correction_bias", bias, (num_experts,))
        return RoutedExperts(
            layers.make([part(f"{mlp}.gate", num_experts)], hidden),
            separate_experts(layers, f"{mlp}.experts", num_experts, hidden, inner, ("w1", "w3", "w2")),
            routing,
            choice_bias=bias,
        )

    share = (moe.rotary_dim or head_size(fields)) / head_size(fields)
    variant = LlamaVariant(
        attention=AttentionOptions(qk_norm=whole_rms_norm(fields.rms_norm_eps)),
        rotates_part=True,
        make_mlp=make_mlp,
    )
    return build_llama({"partial_rotary_factor": share} | config, fields, table, variant)
