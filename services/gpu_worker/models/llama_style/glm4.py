"""GLM-4-0414 (9B, 32B, Z1): GLM with a norm before and after each sublayer."""

from typing import Any

from blockyard.services.gpu_worker.layers.decoder_layers import PostNormLayer
from blockyard.services.gpu_worker.loading.hf_config import with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.glm import DEFAULTS, glm_variant, read_glm
from blockyard.services.gpu_worker.models.llama_style.llama import LayerParts, build_llama, llama_mlp


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields = read_glm(config)

    def make_layer(parts: LayerParts) -> PostNormLayer:
        return PostNormLayer(
            parts.attention,
            parts.make_norm("post_self_attn_layernorm"),
            llama_mlp(parts.layers, fields, parts.prefix, joined="gate_up_proj"),
            parts.make_norm("post_mlp_layernorm"),
            before_attention=parts.make_norm("input_layernorm"),
            before_mlp=parts.make_norm("post_attention_layernorm"),
        )

    return build_llama(config, fields, table, glm_variant(fields, make_layer=make_layer))
