"""Ministral 3: Mistral with queries that grow with the logarithm of their position."""

from typing import Any

import msgspec

from blockyard.services.gpu_worker.loading.hf_config import parse, with_defaults
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.decoder import Decoder
from blockyard.services.gpu_worker.models.llama_style.llama import LlamaConfig, LlamaVariant, build_llama
from blockyard.shared.config import model_bounds as bounds

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
DEFAULTS = {  # of fields that config.json may omit
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_hidden_layers": 34,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_parameters": ROPE,
    "vocab_size": 131072,
}


class Ministral3Config(msgspec.Struct, frozen=True):
    sliding_window: bounds.Window | None = None  # 0 or null: no window


def build(config: dict[str, Any], table: WeightTable) -> Decoder:
    config = with_defaults(config, DEFAULTS)
    fields = msgspec.structs.replace(parse(config, LlamaConfig), mlp_bias=False)
    windows = (parse(config, Ministral3Config).sliding_window or None,) * fields.num_hidden_layers
    return build_llama(config, fields, table, LlamaVariant(windows=windows))
