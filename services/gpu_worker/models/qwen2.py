"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and an optional sliding window in the upper layers."""

from typing import Annotated, Any

import msgspec

from blockyard.services.gpu_worker.layers.attention import AttentionOptions
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama import LlamaConfig, build_llama
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

LAYER_TYPES = ("full_attention", "sliding_attention")


class WindowConfig(msgspec.Struct, frozen=True):
    use_sliding_window: bool = False
    sliding_window: bounds.Window | None = 4096  # 0 or null: no window
    max_window_layers: Annotated[int, msgspec.Meta(ge=0)] = 28  # first layer with a window
    layer_types: list[str] | None = None  # one for each layer, in newer config.json files


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields = parse(config | {"max_position_embeddings": config.get("max_position_embeddings", 32768)}, LlamaConfig)
    fields = msgspec.structs.replace(fields, mlp_bias=False)
    windows = read_windows(config, fields.num_hidden_layers)
    return build_llama(config, fields, table, windows, AttentionOptions(qkv_bias=True))


def read_windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, None for full attention. Raises ConfigError for another layer type."""
    fields = parse(config, WindowConfig)
    window = (fields.sliding_window or None) if fields.use_sliding_window else None
    if fields.layer_types is None:
        return tuple(window if layer >= fields.max_window_layers else None for layer in range(num_layers))
    unknown = [kind for kind in fields.layer_types if kind not in LAYER_TYPES]
    if unknown or len(fields.layer_types) != num_layers:
        raise ConfigError(
            f"config.json: layer_types {fields.layer_types} must name {num_layers} of {', '.join(LAYER_TYPES)}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in fields.layer_types)
