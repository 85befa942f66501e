"""Mistral: Llama with a sliding window in every layer. Later releases set the window to null."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, build_llama
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.checkpoint import UNSAID_WINDOWS

DEFAULTS = {  # of fields that config.json may omit
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


class MistralConfig(msgspec.Struct, frozen=True):
    sliding_window: bounds.Window | None = UNSAID_WINDOWS["MistralForCausalLM"]  # 0 or null: no window


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    own = parse(config, MistralConfig)
    fields = msgspec.structs.replace(parse(config, LlamaConfig), mlp_bias=False)
    windows = (own.sliding_window or None,) * fields.num_hidden_layers
    return build_llama(config, fields, table, LlamaVariant(windows=windows))
