"""Seed-OSS: Llama with biases on q, k and v, and one of its own for the projection of the output."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.attention import AttentionOptions, SeparateQKV
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, build_llama

DEFAULTS = {"head_dim": 128, "max_position_embeddings": 524288, "num_key_value_heads": 8}  # that config.json may omit


class BiasConfig(msgspec.Struct, frozen=True):
    attention_bias: bool = True  # of q, k and v
    attention_out_bias: bool = False


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields, biases = parse(config, LlamaConfig), parse(config, BiasConfig)
    attention = AttentionOptions(qkv=SeparateQKV(bias=biases.attention_bias), out_bias=biases.attention_out_bias)
    return build_llama(config, fields, table, LlamaVariant(attention=attention))
