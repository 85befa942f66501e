"""SmolLM3: Llama with every fourth layer without rotation."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.rope_parameters import FULL, SLIDING
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.layer_types import read_layer_types, read_rotating_layers
from blockyard.services.gpu_worker.models.llama_style.llama import (
    LlamaConfig,
    LlamaVariant,
    biased,
    build_llama,
    read_rotary,
)
from blockyard.shared.config import model_bounds as bounds

DEFAULTS = {  # of fields that config.json may omit
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}


class SmolLM3Config(msgspec.Struct, frozen=True):
    use_sliding_window: bool = False  # in layers without rotation, where config.json has no `layer_types`
    sliding_window: bounds.Window | None = None  # 0 or null: no window


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields, own = parse(config, LlamaConfig), parse(config, SmolLM3Config)
    num_layers = fields.num_hidden_layers
    rotates = read_rotating_layers(config, num_layers)
    rotary = read_rotary(config, fields)
    near = own.use_sliding_window
    kinds = read_layer_types(config, num_layers, lambda layer: SLIDING if near and not rotates[layer] else FULL)
    variant = LlamaVariant(
        attention=biased(fields.attention_bias),
        windows=[own.sliding_window or None if kind == SLIDING else None for kind in kinds],
        rotations=[rotary if rotated else None for rotated in rotates],
    )
    return build_llama(config, fields, table, variant)
