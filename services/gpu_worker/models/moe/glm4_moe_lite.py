"""GLM-4.7-Flash: DeepSeek V3's latent attention and router, with GLM's sizes; a list names layers without experts."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.moe import deepseek_v3
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

DEFAULTS = {  # of fields that config.json may omit
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 256,
}


class LiteConfig(msgspec.Struct, frozen=True):
    num_hidden_layers: bounds.Layers
    mlp_layer_types: list[str] | None = None  # "dense" or "sparse" of each layer; None: see first_k_dense_replace


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS, deepseek_v3.OTHER_NAMES)
    own = parse(config, LiteConfig)
    if own.mlp_layer_types is not None:
        config["first_k_dense_replace"] = _num_dense(own.mlp_layer_types, own.num_hidden_layers)
    return deepseek_v3.build(config, table)


def _num_dense(kinds: list[str], num_layers: int) -> int:
    """The number of first layers without experts. Raises ConfigError for other lists."""
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise ConfigError(
            f"config.json: mlp_layer_types has to name {num_layers} layers, first dense ones and then sparse ones"
        )
    return dense
