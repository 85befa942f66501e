"""Cohere Command R: attention and MLP side by side, LayerNorm without bias, pairs side by side, and scaled logits."""

from dataclasses import replace
from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.decoder_layers import ParallelLayer
from blockyard.services.gpu_worker.layers.norm import LayerNorm, Norm, head_layer_norm
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import (
    LayerParts,
    LlamaConfig,
    LlamaVariant,
    biased,
    build_llama,
    llama_mlp,
)
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {"max_position_embeddings": 8192, "tie_word_embeddings": True}  # that config.json may omit, also of Cohere 2
THETA = {"rope_theta": 500000.0}


class CohereConfig(msgspec.Struct, frozen=True):
    layer_norm_eps: bounds.Epsilon = 1e-5
    logit_scale: bounds.Scale = 0.0625
    use_qk_norm: bool = False  # Command R+


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS | THETA)
    fields, own = read_cohere(config), parse(config, CohereConfig)
    variant = cohere_variant(fields, own)
    if own.use_qk_norm:
        variant = replace(variant, attention=replace(variant.attention, qk_norm=head_layer_norm(own.layer_norm_eps)))
    return build_llama(config, fields, table, variant)


def read_cohere(config: dict[str, Any]) -> LlamaConfig:
    return msgspec.structs.replace(parse(config, LlamaConfig), mlp_bias=False)


def cohere_variant(fields: LlamaConfig, own: CohereConfig, **parts: Any) -> LlamaVariant:
    """Returns what Command R and its successors share, with other `parts` of the variant."""

    def make_norm(table: WeightTable, name: str) -> Norm:
        return LayerNorm(table, name, fields.hidden_size, eps=own.layer_norm_eps, bias=False)

    def make_layer(layer: LayerParts) -> ParallelLayer:
        mlp = llama_mlp(layer.layers, fields, layer.prefix)
        return ParallelLayer(layer.make_norm("input_layernorm"), layer.attention, mlp)

    return LlamaVariant(
        attention=replace(biased(fields.attention_bias), halves_dim=0),
        logits_factor=own.logit_scale,
        make_norm=make_norm,
        make_layer=make_layer,
        **parts,
    )
