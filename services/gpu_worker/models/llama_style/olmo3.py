"""OLMo 3: OLMo 2 with a sliding window in three of four layers, which rotate without scaling."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.rope_parameters import SLIDING, read_rope, read_sliding_rope
from blockyard.services.gpu_worker.layers.rotary import RotaryEmbedding
from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.layer_types import every, read_layer_types
from blockyard.services.gpu_worker.models.llama_style.llama import build_llama, head_size
from blockyard.services.gpu_worker.models.llama_style.olmo2 import olmo_variant, read_olmo
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.checkpoint import UNSAID_WINDOWS

THETA = 500000.0
PERIOD = 4  # every so many layers have no window


class Olmo3Config(msgspec.Struct, frozen=True):
    sliding_window: bounds.Window | None = UNSAID_WINDOWS["Olmo3ForCausalLM"]  # 0 or null: no window


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    fields, window = read_olmo(config), parse(config, Olmo3Config).sliding_window or None
    kinds = read_layer_types(config, fields.num_hidden_layers, every(PERIOD))
    size, longest = head_size(fields), fields.max_position_embeddings
    full = RotaryEmbedding(read_rope(config, longest, THETA), size, longest)
    near = RotaryEmbedding(read_sliding_rope(config, longest, config.get("rope_theta") or THETA), size, longest)
    variant = olmo_variant(
        fields,
        windows=[window if kind == SLIDING else None for kind in kinds],
        rotations=[near if kind == SLIDING else full for kind in kinds],
        max_positions=full.max_positions,
    )
    return build_llama(config, fields, table, variant)
