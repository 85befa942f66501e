"""OLMo 3: OLMo 2 with a sliding window in three of four layers, which rotate without scaling."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.layers.rope_parameters import FULL, SLIDING, read_rope
from blockyard.services.gpu_worker.layers.rotary import RotaryEmbedding
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.layer_types import every, read_layer_types
from blockyard.services.gpu_worker.models.llama_style.llama import build_llama, head_size
from blockyard.services.gpu_worker.models.llama_style.olmo2 import DEFAULTS as OLMO2_DEFAULTS
from blockyard.services.gpu_worker.models.llama_style.olmo2 import olmo_variant, read_olmo
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.checkpoint import UNSAID_WINDOWS

THETA = {"rope_theta": 500000.0}  # of layers with a window, and the default of the others
DEFAULTS = OLMO2_DEFAULTS | THETA  # of fields that config.json may omit
PERIOD = 4  # every so many layers have no window


class Olmo3Config(msgspec.Struct, frozen=True):
    sliding_window: bounds.Window | None = UNSAID_WINDOWS["Olmo3ForCausalLM"]  # 0 or null: no window


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields, window = read_olmo(config), parse(config, Olmo3Config).sliding_window or None
    kinds = read_layer_types(config, fields.num_hidden_layers, every(PERIOD))
    size, longest = head_size(fields), fields.max_position_embeddings
    full = RotaryEmbedding(read_rope(config, longest, layer_type=FULL), size, longest)
    near = RotaryEmbedding(read_rope(config | THETA, longest, layer_type=SLIDING), size, longest)
    variant = olmo_variant(
        fields,
        windows=[window if kind == SLIDING else None for kind in kinds],
        rotations=[near if kind == SLIDING else full for kind in kinds],
        max_positions=full.max_positions,
    )
    return build_llama(config, fields, table, variant)
