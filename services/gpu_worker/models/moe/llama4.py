"""Llama 4, text: attention within chunks, layers without rotation in which queries are scaled by position, and experts.

A token has the experts with the largest logits. Their sigmoids multiply the input of the experts, and the output of one
shared expert is added. Some layers may have no experts. Of the models that also see, this is the text part, without
pictures.
"""

from dataclasses import replace
from typing import Annotated, Any

import msgspec

from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.attention import AttentionOptions
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import FeedForward, GatedMLP
from blockyard.services.gpu_worker.layers.moe.expert_weights import stacked_experts
from blockyard.services.gpu_worker.layers.moe.routed_experts import RoutedExperts
from blockyard.services.gpu_worker.layers.norm import head_l2_norm
from blockyard.services.gpu_worker.layers.rope_parameters import CHUNKED, FULL, read_rope
from blockyard.services.gpu_worker.layers.rotary import QueryScales, RotaryEmbedding
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.layer_types import read_layer_types, read_rotating_layers
from blockyard.services.gpu_worker.models.llama_style.llama import (
    LlamaConfig,
    LlamaVariant,
    biased,
    build_llama,
    head_size,
)
from blockyard.services.gpu_worker.models.moe.moe_config import check_silu, make_routing
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {  # of fields that config.json may omit
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 202048,
}
Index = Annotated[int, msgspec.Meta(ge=0)]


class Llama4Config(msgspec.Struct, frozen=True):
    intermediate_size_mlp: bounds.Width = 16384  # of layers without experts
    num_local_experts: bounds.Experts = 16
    num_experts_per_tok: bounds.Experts = 1
    moe_layers: list[Index] | None = None  # layers with experts
    interleave_moe_layer_step: Annotated[int, msgspec.Meta(ge=1)] = 1  # otherwise every so many layers have experts
    attention_chunk_size: bounds.Window | None = 8192  # 0 or null: no chunks
    use_qk_norm: bool = True  # in layers that rotate
    attn_temperature_tuning: bool | int = True  # in layers that do not rotate, queries grow with their position
    floor_scale: bounds.Positions = 8192
    attn_scale: bounds.Scale = 0.1


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields, own = parse(config, LlamaConfig), parse(config, Llama4Config)
    check_silu(fields.hidden_act)
    table.leave_out("vision_model.", "multi_modal_projector.")
    num_layers, longest = fields.num_hidden_layers, fields.max_position_embeddings
    rotates = read_rotating_layers(config, num_layers)
    kinds = read_layer_types(config, num_layers, lambda layer: CHUNKED if rotates[layer] else FULL, (FULL, CHUNKED))
    rope = read_rope(config, longest)
    rotary, norm_eps = RotaryEmbedding(rope, head_size(fields), longest), fields.rms_norm_eps
    if own.use_qk_norm and rope.rope_type in ("yarn", "longrope"):
        # the norm behind the rotation undoes its factor, except in what the epsilon adds
        norm_eps /= rotary.factor**2
        rotary = RotaryEmbedding(msgspec.structs.replace(rope, attention_factor=1.0), head_size(fields), longest)
    scales = None
    if own.attn_temperature_tuning:
        scales = QueryScales(own.floor_scale, own.attn_scale, rotary.max_positions)
    routing = make_routing(
        "num_local_experts", own.num_local_experts, own.num_experts_per_tok, sigmoid=True, renormalize=False
    )
    with_experts = own.moe_layers
    if with_experts is None:
        with_experts = list(range(own.interleave_moe_layer_step - 1, num_layers, own.interleave_moe_layer_step))

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> FeedForward:
        name = f"{prefix}.feed_forward"
        if layer in with_experts:
            return _make_experts(layers, name, fields, routing)
        return GatedMLP(layers, name, fields.hidden_size, own.intermediate_size_mlp)

    variant = LlamaVariant(
        attentions=[_attention(fields, norm_eps if rotated and own.use_qk_norm else None) for rotated in rotates],
        windows=[own.attention_chunk_size or None if kind == CHUNKED else None for kind in kinds],
        chunked=True,
        rotations=[rotary if rotated else scales for rotated in rotates],
        max_positions=rotary.max_positions,
        make_mlp=make_mlp,
    )
    return build_llama(config, fields, table, variant)


def _attention(fields: LlamaConfig, norm_eps: float | None) -> AttentionOptions:
    """The attention of a layer. Pairs are side by side. The norm of q and k, if `norm_eps` is given, is behind the
    rotation, which does not change the length of a head."""
    norm = None if norm_eps is None else head_l2_norm(norm_eps)
    return replace(biased(fields.attention_bias), halves_dim=0, qk_norm=norm)


def _make_experts(layers: LinearLayers, name: str, fields: LlamaConfig, routing: Routing) -> RoutedExperts:
    hidden, inner, experts = fields.hidden_size, fields.intermediate_size, f"{name}.experts"
    return RoutedExperts(
        layers.make([part(f"{name}.router", routing.num_experts)], hidden),
        stacked_experts(
            layers,
            f"{experts}.gate_up_proj",
            f"{experts}.down_proj",
            routing.num_experts,
            hidden,
            inner,
            transposed=True,
        ),
        routing,
        shared=GatedMLP(layers, f"{name}.shared_expert", hidden, inner),
        scales_input=True,
    )
