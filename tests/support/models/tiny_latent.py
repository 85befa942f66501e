"""Tiny checkpoints of families with latent attention."""

from typing import Any

from tiny_checkpoint import LLAMA, Tiny
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
)

SIZES: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}

LATENT = [
    Tiny(
        "deepseek-v2-lite",
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        LLAMA | SIZES | {"q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
        old_spelling=True,
    ),
    Tiny(
        "deepseek-v2",
        DeepseekV2Config,
        DeepseekV2ForCausalLM,
        LLAMA | SIZES | GROUPS | {"q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_shared_experts": 1},
        {"rope_type": "default"},
    ),
    Tiny(
        "deepseek-v3",
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LLAMA | SIZES | GROUPS | {"q_lora_rank": 20, "n_shared_experts": 1},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    Tiny(
        "deepseek-v3-halves",
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        LLAMA
        | SIZES
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False, "attention_bias": True},
        {"rope_type": "default"},
    ),
    Tiny(
        "glm4-moe-lite",
        Glm4MoeLiteConfig,
        Glm4MoeLiteForCausalLM,
        {key: value for key, value in (LLAMA | SIZES).items() if key != "first_k_dense_replace"}
        | {"q_lora_rank": 20, "v_head_dim": 16, "mlp_layer_types": ["dense", "dense", "sparse"]},
        {"rope_type": "default"},
    ),
]
