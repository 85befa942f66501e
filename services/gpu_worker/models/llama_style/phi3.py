"""Phi-3, Phi-3.5 and Phi-4-mini: Llama with joined projections, LongRoPE and, in Phi-4-mini, partial rotation."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.attention import AttentionOptions, JoinedQKV
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.layers.mlp import GatedMLP
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, build_llama, llama_mlp
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096}  # of fields that config.json may omit


class Phi3Config(msgspec.Struct, frozen=True):
    sliding_window: bounds.Window | None = None  # 0 or null: no window


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields = msgspec.structs.replace(parse(DEFAULTS | config, LlamaConfig), mlp_bias=False)
    window = parse(config, Phi3Config).sliding_window or None

    def make_mlp(layers: LinearLayers, layer: int, prefix: str) -> GatedMLP:
        return llama_mlp(layers, fields, prefix, joined="gate_up_proj")

    attention = AttentionOptions(qkv=JoinedQKV(name="qkv_proj"))
    windows = (window,) * fields.num_hidden_layers
    return build_llama(config, fields, table, LlamaVariant(attention=attention, windows=windows, make_mlp=make_mlp))
