"""Gemma 2: Gemma with norms before and after each sublayer, soft caps, and a sliding window in every other layer."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.decoder_layers import PostNormLayer
from blockyard.services.gpu_worker.layers.rope_parameters import SLIDING
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.gemma.gemma import gemma_variant, read_gemma
from blockyard.services.gpu_worker.models.layer_types import every, read_layer_types
from blockyard.services.gpu_worker.models.llama_style.llama import (
    LayerParts,
    LlamaConfig,
    biased,
    build_llama,
    llama_mlp,
)
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.checkpoint import UNSAID_WINDOWS

DEFAULTS = {  # of fields that config.json may omit
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
PERIOD = 2  # every so many layers have no window


class Gemma2Config(msgspec.Struct, frozen=True):
    query_pre_attn_scalar: bounds.Scale = 256  # scores are divided by its root
    sliding_window: bounds.Window | None = UNSAID_WINDOWS["Gemma2ForCausalLM"]  # 0 or null: no window
    attn_logit_softcapping: bounds.Scale | None = 50.0
    final_logit_softcapping: bounds.Scale | None = 30.0


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields, own = read_gemma(config), parse(config, Gemma2Config)
    kinds = read_layer_types(config, fields.num_hidden_layers, every(PERIOD))
    variant = gemma_variant(
        fields,
        table,
        attention=biased(fields.attention_bias),
        windows=[own.sliding_window or None if kind == SLIDING else None for kind in kinds],
        scale=own.query_pre_attn_scalar**-0.5,
        soft_cap=own.attn_logit_softcapping,
        logits_soft_cap=own.final_logit_softcapping,
        make_layer=lambda parts: four_norms(parts, fields),
    )
    return build_llama(config, fields, table, variant)


def four_norms(parts: LayerParts, fields: LlamaConfig) -> PostNormLayer:
    """Makes the layer of Gemma 2 and 3: norms before and after both sublayers."""
    return PostNormLayer(
        parts.attention,
        parts.make_norm("post_attention_layernorm"),
        llama_mlp(parts.layers, fields, parts.prefix),
        parts.make_norm("post_feedforward_layernorm"),
        before_attention=parts.make_norm("input_layernorm"),
        before_mlp=parts.make_norm("pre_feedforward_layernorm"),
    )
