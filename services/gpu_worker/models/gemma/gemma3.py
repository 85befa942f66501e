"""Gemma 3, text: Gemma 2 with norms of q and k instead of soft caps, and other rotations in layers with a window.

Of the models that also see, this is the text part, without pictures. EmbeddingGemma's tokens attend to both sides.
"""

from dataclasses import replace
from typing import Annotated, Any

import msgspec

from blockyard.services.gpu_worker.layers.norm import head_rms_norm
from blockyard.services.gpu_worker.layers.rope_parameters import DEFAULT_THETA, FULL, SLIDING, read_rope
from blockyard.services.gpu_worker.layers.rotary import RotaryEmbedding
from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.gemma.gemma import gemma_variant, read_gemma
from blockyard.services.gpu_worker.models.gemma.gemma2 import four_norms
from blockyard.services.gpu_worker.models.layer_types import every, read_layer_types
from blockyard.services.gpu_worker.models.llama_style.llama import biased, build_llama, head_size
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.config.checkpoint import UNSAID_WINDOWS
from blockyard.shared.errors import ConfigError

DEFAULTS = {  # of fields that config.json may omit: that of the 4B model has few
    "head_dim": 256,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 262208,
}


class Gemma3Config(msgspec.Struct, frozen=True):
    query_pre_attn_scalar: bounds.Scale = 256  # scores are divided by its root
    sliding_window: bounds.Window | None = UNSAID_WINDOWS["Gemma3ForCausalLM"]  # 0 or null: no window
    sliding_window_pattern: Annotated[int, msgspec.Meta(ge=1)] = 6  # every so many layers have none
    attn_logit_softcapping: bounds.Scale | None = None
    final_logit_softcapping: bounds.Scale | None = None
    rope_local_base_freq: bounds.Base = DEFAULT_THETA
    use_bidirectional_attention: bool | None = False


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields, own = read_gemma(config), parse(config, Gemma3Config)
    both_sides = bool(own.use_bidirectional_attention)  # of EmbeddingGemma
    if both_sides and own.attn_logit_softcapping is not None:
        raise ConfigError("config.json: attn_logit_softcapping is not supported with use_bidirectional_attention")
    window = own.sliding_window
    if both_sides and window:
        window = window // 2 + 1  # of each side, its own key included
    table.leave_out("vision_tower.", "multi_modal_projector.")
    kinds = read_layer_types(config, fields.num_hidden_layers, every(own.sliding_window_pattern))
    size, longest = head_size(fields), fields.max_position_embeddings
    full = RotaryEmbedding(read_rope(config, longest, layer_type=FULL), size, longest)
    near = RotaryEmbedding(
        read_rope(config | {"rope_theta": own.rope_local_base_freq}, longest, layer_type=SLIDING), size, longest
    )
    attention = replace(biased(fields.attention_bias), qk_norm=head_rms_norm(fields.rms_norm_eps, unit_offset=True))
    variant = gemma_variant(
        fields,
        table,
        attention=attention,
        windows=[window or None if kind == SLIDING else None for kind in kinds],
        both_sides=both_sides,
        scale=own.query_pre_attn_scalar**-0.5,
        soft_cap=own.attn_logit_softcapping,
        rotations=[near if kind == SLIDING else full for kind in kinds],
        max_positions=longest,  # counts the scaling of the rotations already
        logits_soft_cap=own.final_logit_softcapping,
        make_layer=lambda parts: four_norms(parts, fields),
    )
    return build_llama(config, fields, table, variant)
