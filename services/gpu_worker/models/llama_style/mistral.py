"""Mistral: Llama with a sliding window in every layer. Later releases set the window to null."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, build_llama
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.checkpoint import UNSAID_WINDOWS


class MistralConfig(msgspec.Struct, frozen=True):
    """The fields of config.json with other defaults than Llama. A window of 0 means no window."""

    sliding_window: bounds.Window | None = UNSAID_WINDOWS["MistralForCausalLM"]
    max_position_embeddings: bounds.Positions = 4096 * 32
    num_key_value_heads: bounds.Heads | None = 8


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    own = parse(config, MistralConfig)
    fields = msgspec.structs.replace(
        parse(config, LlamaConfig),
        max_position_embeddings=own.max_position_embeddings,
        num_key_value_heads=own.num_key_value_heads,
        mlp_bias=False,
    )
    windows = (own.sliding_window or None,) * fields.num_hidden_layers
    return build_llama(config, fields, table, LlamaVariant(windows=windows))
