"""GLM-4 of 2024 (glm-4-9b-chat-hf): Llama with half of each head rotated, in pairs side by side, and a joined MLP."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.attention import AttentionOptions, SeparateQKV
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import GatedMLP
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import (
    LlamaConfig,
    LlamaVariant,
    build_llama,
    llama_mlp,
)

DEFAULTS = {  # of fields that config.json may omit
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
}


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields = read_glm(config)

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> GatedMLP:
        return llama_mlp(layers, fields, prefix, joined="gate_up_proj")

    return build_llama(config, fields, table, glm_variant(fields, make_mlp=make_mlp))


def read_glm(config: dict[str, Any]) -> LlamaConfig:
    return msgspec.structs.replace(parse(config, LlamaConfig), mlp_bias=False)


def glm_variant(fields: LlamaConfig, **parts: Any) -> LlamaVariant:
    """Returns the attention that GLM models share, with other `parts` of the variant."""
    attention = AttentionOptions(qkv=SeparateQKV(bias=fields.attention_bias), halves_dim=0)
    return LlamaVariant(attention=attention, rotates_part=True, **parts)
