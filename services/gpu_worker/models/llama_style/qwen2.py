"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and an optional sliding window in the upper layers."""

from typing import Annotated, Any

import msgspec

from blockyard.services.gpu_worker.layers.attention import AttentionOptions, SeparateQKV
from blockyard.services.gpu_worker.layers.rope_parameters import FULL, SLIDING
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.layer_types import read_layer_types
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, build_llama
from blockyard.shared.config import model_bounds as bounds


class WindowConfig(msgspec.Struct, frozen=True):
    use_sliding_window: bool = False
    sliding_window: bounds.Window | None = 4096  # 0 or null: no window
    max_window_layers: Annotated[int, msgspec.Meta(ge=0)] = 28  # first layer with a window


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields = parse(config | {"max_position_embeddings": config.get("max_position_embeddings", 32768)}, LlamaConfig)
    fields = msgspec.structs.replace(fields, mlp_bias=False)
    attention = AttentionOptions(qkv=SeparateQKV(bias=True))
    windows = read_windows(config, fields.num_hidden_layers)
    return build_llama(config, fields, table, LlamaVariant(attention=attention, windows=windows))


def read_windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, None for full attention. Raises ConfigError for another layer type."""
    fields = parse(config, WindowConfig)
    window = (fields.sliding_window or None) if fields.use_sliding_window else None
    kinds = read_layer_types(config, num_layers, lambda layer: SLIDING if layer >= fields.max_window_layers else FULL)
    return tuple(window if kind == SLIDING else None for kind in kinds)
