"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with joined projections, LongRoPE and, in Phi-4-mini, partial rotation."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.attention import AttentionOptions, JoinedQKV
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
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {  # of fields that config.json may omit
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}


class Phi3Config(msgspec.Struct, frozen=True):
    sliding_window: bounds.Window | None = None  # 0 or null: no window


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields = msgspec.structs.replace(parse(config, LlamaConfig), mlp_bias=False)
    window = parse(config, Phi3Config).sliding_window or None

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> GatedMLP:
        return llama_mlp(layers, fields, prefix, joined="gate_up_proj")

    attention = AttentionOptions(qkv=JoinedQKV(name="qkv_proj"))
    windows = (window,) * fields.num_hidden_layers
    variant = LlamaVariant(attention=attention, windows=windows, rotates_part=True, make_mlp=make_mlp)
    return build_llama(config, fields, table, variant)
