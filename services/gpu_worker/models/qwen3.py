"""Qwen3: Llama with an RMSNorm over each head of q and k, and an explicit head size in config.json."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.attention import AttentionOptions
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama import LlamaConfig, build_llama
from blockyard.services.gpu_worker.models.qwen2 import read_windows

DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32768}  # of fields that config.json may omit


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields = msgspec.structs.replace(parse(DEFAULTS | config, LlamaConfig), mlp_bias=False)
    bias, eps = fields.attention_bias, fields.rms_norm_eps
    attention = AttentionOptions(qkv_bias=bias, out_bias=bias, qk_norm_eps=eps)
    return build_llama(config, fields, table, read_windows(config, fields.num_hidden_layers), attention)
