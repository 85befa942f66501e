"""SmolLM3: Llama with every fourth layer without rotation."""

from typing import Annotated, Any

import msgspec

from blockyard.services.gpu_worker.layers.rope_parameters import FULL, SLIDING
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.layer_types import read_layer_types
from blockyard.services.gpu_worker.models.llama_style.llama import (
    LlamaConfig,
    LlamaVariant,
    biased,
    build_llama,
    read_rotary,
)
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

THETA = 2000000.0
DEFAULTS = {  # of fields that config.json may omit
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}


class SmolLM3Config(msgspec.Struct, frozen=True):
    no_rope_layers: list[int] | None = None  # of each layer: 1 if it rotates, otherwise 0
    no_rope_layer_interval: Annotated[int, msgspec.Meta(ge=1)] = 4  # every so many layers do not
    use_sliding_window: bool = False
    sliding_window: bounds.Window | None = None  # 0 or null: no window


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields, own = parse(DEFAULTS | config, LlamaConfig), parse(config, SmolLM3Config)
    num_layers, period = fields.num_hidden_layers, own.no_rope_layer_interval
    rotates = own.no_rope_layers or [int((layer + 1) % period != 0) for layer in range(num_layers)]
    if len(rotates) != num_layers:
        raise ConfigError(f"config.json: no_rope_layers has {len(rotates)} entries for {num_layers} layers")
    rotary = read_rotary(config, fields, default_theta=THETA)
    kinds = read_layer_types(config, num_layers, lambda layer: FULL if rotates[layer] else SLIDING)
    window = (own.sliding_window or None) if own.use_sliding_window else None
    variant = LlamaVariant(
        attention=biased(fields.attention_bias),
        windows=[window if kind == SLIDING else None for kind in kinds],
        rotations=[rotary if rotated else None for rotated in rotates],
    )
    return build_llama(config, fields, table, variant)
