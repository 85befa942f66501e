"""Cohere Command R7B and Command A: Command R with a sliding window in most layers; the others do not rotate."""

from typing import Annotated, Any

import msgspec

from blockyard.services.gpu_worker.layers.rope_parameters import SLIDING
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.layer_norm.cohere import DEFAULTS, CohereConfig, cohere_variant, read_cohere
from blockyard.services.gpu_worker.models.layer_types import every, read_layer_types
from blockyard.services.gpu_worker.models.llama_style.llama import build_llama, read_rotary
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.checkpoint import UNSAID_WINDOWS


class Cohere2Config(msgspec.Struct, frozen=True):
    sliding_window: bounds.Window | None = UNSAID_WINDOWS["Cohere2ForCausalLM"]  # 0 or null: no window
    sliding_window_pattern: Annotated[int, msgspec.Meta(ge=1)] = 4  # every so many layers have none


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields, own = read_cohere(config), parse(config, Cohere2Config)
    kinds = read_layer_types(config, fields.num_hidden_layers, every(own.sliding_window_pattern))
    rotary, window = read_rotary(config, fields), own.sliding_window or None
    variant = cohere_variant(
        fields,
        parse(config, CohereConfig),
        windows=[window if kind == SLIDING else None for kind in kinds],
        rotations=[rotary if kind == SLIDING else None for kind in kinds],
    )
    return build_llama(config, fields, table, variant)
