"""Qwen3: Llama with an RMSNorm over each head of q and k, and a head size of its own."""

from dataclasses import replace
from typing import Any

import msgspec

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.hf_config import parse
from blockyard.services.gpu_worker.models.llama import LlamaConfig, decoder_shape
from blockyard.services.gpu_worker.models.qwen2 import read_windows

DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32768}  # where a folder is silent


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields = msgspec.structs.replace(parse(DEFAULTS | config, LlamaConfig), mlp_bias=False)
    shape = decoder_shape(fields, config)
    return Decoder(replace(shape, qk_norm=True, windows=read_windows(config, shape.num_layers)), table)
