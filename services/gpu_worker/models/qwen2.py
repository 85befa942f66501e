"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window in the upper layers if switched on."""

from dataclasses import replace
from typing import Annotated, Any

import msgspec

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.hf_config import parse
from blockyard.services.gpu_worker.models.llama import LlamaConfig, decoder_shape
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

LAYER_TYPES = ("full_attention", "sliding_attention")


class WindowConfig(msgspec.Struct, frozen=True):
    use_sliding_window: bool = False
    sliding_window: bounds.Window | None = 4096  # 0 is none, too
    max_window_layers: Annotated[int, msgspec.Meta(ge=0)] = 28  # layers from this one on have the window
    layer_types: list[str] | None = None  # says it layer by layer, in newer folders


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields = parse(config | {"max_position_embeddings": config.get("max_position_embeddings", 32768)}, LlamaConfig)
    fields = msgspec.structs.replace(fields, attention_bias=False, mlp_bias=False)
    shape = decoder_shape(fields, config)
    return Decoder(replace(shape, qkv_bias=True, windows=read_windows(config, shape.num_layers)), table)


def read_windows(config: dict[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Each layer's window. Raises ConfigError for a kind of layer that is not attention."""
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
