"""Qwen3: Llama with an RMSNorm over each head of q and k, and an explicit head size in config.json."""

from dataclasses import replace
from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.norm import head_rms_norm
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, biased, build_llama
from blockyard.services.gpu_worker.models.llama_style.qwen2 import read_windows

DEFAULTS = {  # of fields that config.json may omit
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
}


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields = msgspec.structs.replace(parse(config, LlamaConfig), mlp_bias=False)
    attention = replace(biased(fields.attention_bias), qk_norm=head_rms_norm(fields.rms_norm_eps))
    windows = read_windows(config, fields.num_hidden_layers)
    return build_llama(config, fields, table, LlamaVariant(attention=attention, windows=windows))
