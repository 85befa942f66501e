"""OLMo 2: Llama with norms after the sublayers instead of before them, and norms over all q and over all k heads."""

from dataclasses import replace
from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.decoder_layers import PostNormLayer
from blockyard.services.gpu_worker.layers.norm import whole_rms_norm
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

DEFAULTS = {"rms_norm_eps": 1e-5}  # of fields that config.json may omit


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields = read_olmo(config)
    return build_llama(config, fields, table, olmo_variant(fields))


def read_olmo(config: dict[str, Any]) -> LlamaConfig:
    return msgspec.structs.replace(parse(config, LlamaConfig), mlp_bias=False)


def olmo_variant(fields: LlamaConfig, **parts: Any) -> LlamaVariant:
    """Returns what OLMo 2 and 3 share, with other `parts` of the variant."""

    def make_layer(layer: LayerParts) -> PostNormLayer:
        return PostNormLayer(
            layer.attention,
            layer.make_norm("post_attention_layernorm"),
            llama_mlp(layer.layers, fields, layer.prefix),
            layer.make_norm("post_feedforward_layernorm"),
        )

    attention = replace(biased(fields.attention_bias), qk_norm=whole_rms_norm(fields.rms_norm_eps))
    return LlamaVariant(attention=attention, make_layer=make_layer, **parts)
