"""Tiny checkpoints of the dense families that differ from Llama, and of Llama by other names."""

from typing import Any

import transformers as hf
from tiny_checkpoint import BASE, Tiny
from tiny_checkpoint import LLAMA as PLAIN_LLAMA

PLAIN = {"rope_type": "default"}
LLAMA = PLAIN_LLAMA | {"rms_norm_eps": 0.01}  # large, so that a wrong one shows
WIDE = LLAMA | {"head_dim": 32, "tie_word_embeddings": True}
LONG = {"short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0, 6.0]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
COHERE = LLAMA | {"tie_word_embeddings": True, "logit_scale": 0.3, "layer_norm_eps": 0.01}
FALCON = BASE | {"max_position_embeddings": 256, "initializer_range": 0.2, "layer_norm_epsilon": 0.01}
GPT2 = BASE | {"n_positions": 256, "initializer_range": 0.2, "layer_norm_epsilon": 0.01}
NEOX = FALCON | {"intermediate_size": 96, "layer_norm_eps": 0.01}
MINISTRAL = YARN | {
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def _kinds(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


GEMMA3 = WIDE | {"query_pre_attn_scalar": 24, "sliding_window": 20, "sliding_window_pattern": 3}
GEMMA3_ROPE = _kinds(
    {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0}, {"rope_type": "default", "rope_theta": 500.0}
)
GEMMA3_OLD = {  # as released
    "rope_parameters": None,
    "layer_types": None,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "rope_theta": 50000.0,
    "rope_local_base_freq": 500.0,
    "sliding_window_pattern": 3,
}

GEMMA4_ROPE = _kinds(
    {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 50000.0},
    {"rope_type": "default", "rope_theta": 500.0},
)
GEMMA4 = LLAMA | GEMMA4_ROPE | {
    "tie_word_embeddings": True, "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 20, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 4.0,
}  # fmt: skip
GEMMA4_RELEASED = {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1}
GEMMA4_EXPERTS = GEMMA4 | {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 32,
}  # fmt: skip

DENSE = [
    Tiny("longchat", hf.LlamaConfig, hf.LlamaForCausalLM, LLAMA, {"rope_type": "linear", "factor": 4.0},
         rewrite={"rope_parameters": None, "rope_theta": 5000.0, "rope_condense_ratio": 4}),
    Tiny("llama-by-another-name", hf.LlamaConfig, hf.LlamaForCausalLM, LLAMA, PLAIN,
         rewrite={"architectures": ["LLaMAForCausalLM"]}),
    Tiny("aquila", hf.LlamaConfig, hf.LlamaForCausalLM, LLAMA, PLAIN, rewrite={"architectures": ["AquilaForCausalLM"]}),
    Tiny("arcee", hf.ArceeConfig, hf.ArceeForCausalLM, LLAMA, PLAIN),
    Tiny("seed-oss", hf.SeedOssConfig, hf.SeedOssForCausalLM, LLAMA | {"head_dim": 32, "attention_out_bias": True},
         PLAIN),
    Tiny("phi3", hf.Phi3Config, hf.Phi3ForCausalLM, LLAMA | {"sliding_window": 20}, PLAIN),
    Tiny("phi3-long", hf.Phi3Config, hf.Phi3ForCausalLM,
         LLAMA | {"original_max_position_embeddings": 16, "tie_word_embeddings": True},
         {"rope_type": "longrope", "partial_rotary_factor": 0.5, **LONG}),
    Tiny("phi3-short", hf.Phi3Config, hf.Phi3ForCausalLM, LLAMA | {"original_max_position_embeddings": 256},
         {"rope_type": "longrope", "partial_rotary_factor": 0.5, "factor": 4.0, **LONG}),
    Tiny("glm", hf.GlmConfig, hf.GlmForCausalLM, LLAMA | {"head_dim": 16}, {"partial_rotary_factor": 0.5} | PLAIN),
    Tiny("glm4", hf.Glm4Config, hf.Glm4ForCausalLM, LLAMA | {"head_dim": 16}, {"partial_rotary_factor": 0.5} | PLAIN),
    Tiny("granite", hf.GraniteConfig, hf.GraniteForCausalLM,
         LLAMA | {"embedding_multiplier": 12.0, "logits_scaling": 3.0, "residual_multiplier": 0.22,
                  "attention_multiplier": 0.15}, PLAIN),
    Tiny("olmo2", hf.Olmo2Config, hf.Olmo2ForCausalLM, LLAMA, PLAIN),
    Tiny("olmo3", hf.Olmo3Config, hf.Olmo3ForCausalLM,
         LLAMA | {"num_hidden_layers": 4, "sliding_window": 20}
         | _kinds({"rope_theta": 5000.0, **YARN}, {"rope_theta": 5000.0, **PLAIN})),
    Tiny("olmo3-old", hf.Olmo3Config, hf.Olmo3ForCausalLM,
         LLAMA | {"num_hidden_layers": 4, "sliding_window": 20}
         | _kinds({"rope_theta": 5000.0, **YARN}, {"rope_theta": 500000.0, **PLAIN}),
         rewrite={"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 5000.0}),
    Tiny("mistral-heads", hf.MistralConfig, hf.MistralForCausalLM,
         LLAMA | {"sliding_window": None, "head_dim": 32}, PLAIN),
    Tiny("ministral3", hf.Ministral3Config, hf.Ministral3ForCausalLM, LLAMA | {"head_dim": 32}, MINISTRAL),
    Tiny("mistral3", hf.Mistral3Config, hf.Mistral3ForConditionalGeneration,
         {"text_config": LLAMA | {"model_type": "ministral3", "head_dim": 32,
                                  "rope_parameters": {"rope_theta": 5000.0, **MINISTRAL}},
          "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
          "tie_word_embeddings": False, "image_token_index": 210}),
    Tiny("cohere", hf.CohereConfig, hf.CohereForCausalLM,
         COHERE, PLAIN),
    Tiny("cohere-plus", hf.CohereConfig, hf.CohereForCausalLM,
         COHERE | {"use_qk_norm": True, "attention_bias": True}, PLAIN),
    Tiny("cohere2", hf.Cohere2Config, hf.Cohere2ForCausalLM,
         COHERE | {"num_hidden_layers": 4, "sliding_window": 20},
         PLAIN),
    Tiny("smollm3", hf.SmolLM3Config, hf.SmolLM3ForCausalLM, LLAMA | {"no_rope_layer_interval": 2}, PLAIN),
    Tiny("starcoder2", hf.Starcoder2Config, hf.Starcoder2ForCausalLM,
         LLAMA | {"sliding_window": 20, "tie_word_embeddings": True, "norm_epsilon": 0.01}, PLAIN),
    Tiny("falcon-7b-like", hf.FalconConfig, hf.FalconForCausalLM, FALCON, PLAIN),
    Tiny("falcon-40b-like", hf.FalconConfig, hf.FalconForCausalLM,
         FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}, PLAIN),
    Tiny("falcon-serial", hf.FalconConfig, hf.FalconForCausalLM,
         FALCON | {"multi_query": False, "parallel_attn": False, "bias": True}, PLAIN),
    Tiny("gpt2", hf.GPT2Config, hf.GPT2LMHeadModel, GPT2),
    Tiny("gpt2-scaled", hf.GPT2Config, hf.GPT2LMHeadModel,
         GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 96, "activation_function": "relu"}),
    Tiny("gpt-neox", hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM, NEOX, {"partial_rotary_factor": 0.25} | PLAIN),
    Tiny("gpt-neox-serial", hf.GPTNeoXConfig, hf.GPTNeoXForCausalLM, NEOX | {"use_parallel_residual": False},
         {"partial_rotary_factor": 0.5} | PLAIN,
         rewrite={"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 5000}),
    Tiny("gemma", hf.GemmaConfig, hf.GemmaForCausalLM, WIDE, PLAIN),
    Tiny("gemma2", hf.Gemma2Config, hf.Gemma2ForCausalLM,
         WIDE | {"query_pre_attn_scalar": 24, "sliding_window": 20, "attn_logit_softcapping": 5.0,
                 "final_logit_softcapping": 4.0, "num_hidden_layers": 4}, PLAIN),
    Tiny("gemma3", hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, GEMMA3 | GEMMA3_ROPE),
    Tiny("gemma3-old", hf.Gemma3TextConfig, hf.Gemma3ForCausalLM, GEMMA3 | GEMMA3_ROPE, rewrite=GEMMA3_OLD),
    Tiny("gemma3-sees", hf.Gemma3Config, hf.Gemma3ForConditionalGeneration,
         {"text_config": GEMMA3 | GEMMA3_ROPE | {"model_type": "gemma3_text"},
          "vision_config": VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
          "mm_tokens_per_image": 4, "image_token_index": 210}),
    Tiny("gemma4", hf.Gemma4TextConfig, hf.Gemma4ForCausalLM, GEMMA4, rewrite=GEMMA4_RELEASED),
    Tiny("gemma4-moe", hf.Gemma4TextConfig, hf.Gemma4ForCausalLM, GEMMA4_EXPERTS | {"attention_k_eq_v": False}),
    Tiny("gemma4-sees", hf.Gemma4Config, hf.Gemma4ForConditionalGeneration,
         {"text_config": GEMMA4_EXPERTS | {"model_type": "gemma4_text", "pad_token_id": 0},
          "vision_config": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
                            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
                            "position_embedding_size": 16, "patch_size": 8},
          "audio_config": None}),
]  # fmt: skip
