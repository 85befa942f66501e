"""Mistral: Llama with a sliding window in every layer (null in later releases)."""

from dataclasses import replace
from typing import Any

import msgspec

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.hf_config import parse
from blockyard.services.gpu_worker.models.llama import LlamaConfig, decoder_shape
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.checkpoint import UNSAID_WINDOWS


class MistralConfig(msgspec.Struct, frozen=True):
    """What is Mistral's own; 0 is no window."""

    sliding_window: bounds.Window | None = UNSAID_WINDOWS["MistralForCausalLM"]
    max_position_embeddings: bounds.Positions = 4096 * 32
    num_key_value_heads: bounds.Heads | None = 8


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    own = parse(config, MistralConfig)
    fields = msgspec.structs.replace(
        parse(config, LlamaConfig),
        max_position_embeddings=own.max_position_embeddings,
        num_key_value_heads=own.num_key_value_heads,
        attention_bias=False,
        mlp_bias=False,
    )
    shape = decoder_shape(fields, config)
    return Decoder(replace(shape, windows=(own.sliding_window or None,) * shape.num_layers), table)
