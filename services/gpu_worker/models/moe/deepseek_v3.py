"""DeepSeek V3, R1 and Kimi K2: latent attention, first dense layers, then routed and shared experts.

The router chooses by sigmoids with a bias, among groups of experts, in float32. `build_deepseek` also builds V2.
"""

from typing import Annotated, Any

import msgspec
import torch

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.activations import read_activation
from blockyard.services.gpu_worker.layers.decoder_layers import PreNormLayer
from blockyard.services.gpu_worker.layers.embedding import Head, TokenEmbedding
from blockyard.services.gpu_worker.layers.latent.latent_attention import LatentAttention, LatentSizes, latent_shape
from blockyard.services.gpu_worker.layers.latent.up_projection import UpProjection
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import FeedForward, GatedMLP
from blockyard.services.gpu_worker.layers.moe.expert_weights import separate_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import ExactRouter, RoutedExperts
from blockyard.services.gpu_worker.layers.norm import make_rms_norm
from blockyard.services.gpu_worker.layers.rope_parameters import read_rope
from blockyard.services.gpu_worker.layers.rotary import LayerRotations, RotaryEmbedding
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.models.moe.moe_config import check_silu, leave_out_draft_layers, make_routing
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

DEFAULTS = {  # of fields that config.json may omit
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
}
OTHER_NAMES = {"num_local_experts": "n_routed_experts"}


class DeepseekConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of config.json that DeepSeek models use. Families have their own defaults."""

    vocab_size: bounds.Vocabulary
    hidden_size: bounds.Width
    intermediate_size: bounds.Width
    num_hidden_layers: bounds.Layers
    num_attention_heads: bounds.Heads
    kv_lora_rank: bounds.HeadSize
    q_lora_rank: bounds.Width | None = None
    qk_nope_head_dim: bounds.HeadSize
    qk_rope_head_dim: bounds.HeadSize
    v_head_dim: bounds.HeadSize
    moe_intermediate_size: bounds.Width
    n_routed_experts: bounds.Experts
    num_experts_per_tok: bounds.Experts
    n_shared_experts: bounds.Experts | None = None
    n_group: bounds.Experts | None = None
    topk_group: bounds.Experts | None = None
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: Annotated[int, msgspec.Meta(ge=0)] = 0  # layers without experts
    moe_layer_freq: int = 1
    max_position_embeddings: bounds.Positions = 4096
    rms_norm_eps: bounds.Epsilon = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    rope_interleave: bool = True  # pairs that are rotated are side by side


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS, OTHER_NAMES)
    fields = parse(config, DeepseekConfig)
    routing = make_routing(
        "n_routed_experts",
        fields.n_routed_experts,
        fields.num_experts_per_tok,
        sigmoid=True,
        renormalize=fields.norm_topk_prob,
        scale=fields.routed_scaling_factor,
        groups=fields.n_group or 1,
        top_groups=fields.topk_group or 1,
        sum_of_two=True,
    )
    return build_deepseek(config, fields, table, routing, has_choice_bias=True)


def build_deepseek(
    config: dict[str, Any], fields: DeepseekConfig, table: WeightTable, routing: Routing, *, has_choice_bias: bool
) -> Decoder:
    """has_choice_bias: the checkpoint has a bias that is added to scores for the choice of experts alone."""
    if fields.moe_layer_freq != 1:
        raise ConfigError(f"config.json: moe_layer_freq {fields.moe_layer_freq} is not supported, only 1 is")
    hidden, num_layers = fields.hidden_size, fields.num_hidden_layers
    layers, activation = LinearLayers(table, config), read_activation("hidden_act", fields.hidden_act)
    rope = read_rope(config, fields.max_position_embeddings)
    sizes = LatentSizes(
        num_heads=fields.num_attention_heads,
        plain_dim=fields.qk_nope_head_dim,
        rotated_dim=fields.qk_rope_head_dim,
        value_dim=fields.v_head_dim,
        latent_dim=fields.kv_lora_rank,
        query_latent_dim=fields.q_lora_rank,
    )

    def make_norm(name: str) -> RMSNorm:
        return make_rms_norm(table, name, hidden, fields.rms_norm_eps)

    def make_mlp(layer: int, prefix: str) -> FeedForward:
        if layer < fields.first_k_dense_replace:
            return GatedMLP(layers, prefix, hidden, fields.intermediate_size, activation)
        return _make_experts(layers, fields, routing, prefix, activation, has_choice_bias)

    ups: list[UpProjection] = []

    def make_layer(layer: int) -> PreNormLayer:
        prefix = f"model.layers.{layer}"
        attention = LatentAttention(
            layers,
            f"{prefix}.self_attn",
            layer,
            hidden,
            sizes,
            bias=fields.attention_bias,
            halves=not fields.rope_interleave,
        )
        ups.append(attention.up)
        norms = (make_norm(f"{prefix}.input_layernorm"), make_norm(f"{prefix}.post_attention_layernorm"))
        return PreNormLayer(norms[0], attention, norms[1], make_mlp(layer, f"{prefix}.mlp"))

    embedding = TokenEmbedding(layers, "model.embed_tokens", fields.vocab_size, hidden)
    rotary = RotaryEmbedding(rope, sizes.rotated_dim, fields.max_position_embeddings)
    leave_out_draft_layers(config, table, num_layers)
    return Decoder(
        table,
        ModelShape(
            vocab_size=fields.vocab_size,
            max_positions=rotary.max_positions,
            attention=(latent_shape(sizes, rope),) * num_layers,
        ),
        embedding=embedding,
        make_layer=make_layer,
        norm=make_norm("model.norm"),
        head=Head(embedding.make_head(layers, fields.tie_word_embeddings)),
        rotations=LayerRotations((rotary,) * num_layers),
        up_projections=ups,
    )


def _make_experts(
    layers: LinearLayers, fields: DeepseekConfig, routing: Routing, prefix: str, activation: str, has_choice_bias: bool
) -> RoutedExperts:
    check_silu(activation)
    table, hidden, inner, num_experts = (
        layers.table, fields.hidden_size, fields.moe_intermediate_size, routing.num_experts,
    )  # fmt: skip
    bias = shared = None
    if has_choice_bias:
        bias = table.empty(num_experts, dtype=torch.float32)
        table.place(f"{prefix}.gate.e_score_correction_bias", bias, (num_experts,))
    if fields.n_shared_experts is not None:
        shared = GatedMLP(layers, f"{prefix}.shared_experts", hidden, inner * fields.n_shared_experts)
    return RoutedExperts(
        ExactRouter(layers, f"{prefix}.gate", num_experts, hidden),
        separate_experts(layers, f"{prefix}.experts", num_experts, hidden, inner),
        routing,
        choice_bias=bias,
        shared=shared,
    )
