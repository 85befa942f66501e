"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and an optional sliding window in the upper layers."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from blockyard.services.gpu_worker.layers.attention import AttentionOptions, SeparateQKV
from blockyard.services.gpu_worker.layers.rope_parameters import FULL, SLIDING
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.layer_types import read_layer_types
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, build_llama
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {"max_position_embeddings": 32768, "num_key_value_heads": 32}  # of fields that config.json may omit


class WindowConfig(msgspec.Struct, frozen=True):
    use_sliding_window: bool = False
    sliding_window: bounds.Window | None = 4096  # 0 or null: no window
    max_window_layers: Annotated[int, msgspec.Meta(ge=0)] = 28  # first layer with a window; Qwen2-MoE: without

    @property
    def window(self) -> int | None:
        """The sliding window of layers that have one, None for full attention."""
        return (self.sliding_window or None) if self.use_sliding_window else None


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields = parse(config, LlamaConfig)
    fields = msgspec.structs.replace(fields, mlp_bias=False)
    attention = AttentionOptions(qkv=SeparateQKV(bias=True))
    windows = read_windows(config, fields.num_hidden_layers)
    return build_llama(config, fields, table, LlamaVariant(attention=attention, windows=windows))


def read_windows(
    config: dict[str, Any],
    num_layers: int,
    slides: Callable[[int, int], bool] = lambda layer, max_window_layers: layer >= max_window_layers,
) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer, None for full attention. Raises ConfigError for another layer type.

    slides: whether a layer has a window, of its number and `max_window_layers`, if config.json has no `layer_types`.
    """
    fields = parse(config, WindowConfig)
    most = fields.max_window_layers
    kinds = read_layer_types(config, num_layers, lambda layer: SLIDING if slides(layer, most) else FULL)
    return tuple(fields.window if kind == SLIDING else None for kind in kinds)
