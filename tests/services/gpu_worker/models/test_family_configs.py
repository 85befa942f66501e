"""What configs of the families ask for, and which of them are refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_latent import SIZES
from tiny_models import LLAMA

from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.models.registry import find_family
from blockyard.shared.errors import ConfigError

FALCON = {**LLAMA, "architectures": ["FalconForCausalLM"]}
DEEPSEEK = {
    **LLAMA,
    **SIZES,
    "q_lora_rank": None,
    "architectures": ["DeepseekV3ForCausalLM"],
}
GEMMA4 = {  # the text part of the 26B-A4B model as released
    "architectures": ["Gemma4ForConditionalGeneration"],
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": 8,
    "use_bidirectional_attention": "vision",
    "vocab_size": 262144,
}
LLAMA4 = {**LLAMA, "architectures": ["Llama4ForCausalLM"], "num_local_experts": 16}
GPT_OSS = {  # the 20b model as released
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {"quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 11, "n_embd": 16, "n_layer": 2, "n_head": 2}


def build(config: dict[str, Any]) -> Any:
    return find_family(config)(config, WeightTable(torch.bfloat16, torch.device("meta")))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (FALCON | {"alibi": True}, "alibi: no attention kernel here adds a bias by distance"),
        (FALCON | {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn false contradicts"),
        (FALCON | {"new_decoder_architecture": True, "num_kv_heads": 3}, r"4 heads cannot share 3 .*num_kv_heads"),
        (FALCON | {"num_attention_heads": 5}, "5 heads do not divide hidden_size 64"),
        (FALCON | {"activation": "sin"}, "activation 'sin' is not supported"),
        (GPT2 | {"n_head": 3}, "n_head 3 does not divide n_embd 16"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention"),
        (GPT2 | {"n_embd": None}, "n_embd"),
        (DEEPSEEK | {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        (DEEPSEEK | {"n_group": 3}, "n_group 3 does not divide n_routed_experts 8"),
        (DEEPSEEK | {"n_group": 1, "topk_group": 5}, "topk_group 5 is more than n_group 1"),
        (
            DEEPSEEK | {"n_group": 4, "topk_group": 1},
            "topk_group 1 leaves 2 experts, fewer than num_experts_per_tok 3",
        ),
        (DEEPSEEK | {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than n_routed_experts 8"),
        (DEEPSEEK | {"kv_lora_rank": 7}, "kv_lora_rank"),
        (DEEPSEEK | {"qk_rope_head_dim": 5}, "qk_rope_head_dim"),
        (DEEPSEEK | {"hidden_act": "gelu"}, "hidden_act 'gelu' of experts"),
        (
            DEEPSEEK | {"architectures": ["DeepseekV2ForCausalLM"], "topk_method": "noaux_tc"},
            "topk_method noaux_tc is not supported, greedy, group_limited_greedy are",
        ),
        (
            DEEPSEEK | {"architectures": ["Glm4MoeLiteForCausalLM"], "mlp_layer_types": ["sparse", "dense", "sparse"]},
            "mlp_layer_types has to name 3 layers, first dense ones",
        ),
        (LLAMA | {"architectures": ["GPTNeoXForCausalLM"], "num_attention_heads": 5}, "5 heads do not divide"),
        (LLAMA | {"architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 2.0}, "rotary_pct"),
        (LLAMA | {"architectures": ["Phi3ForCausalLM"], "num_key_value_heads": 3}, "4 heads cannot share 3"),
        (LLAMA | {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        (LLAMA | {"architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        (LLAMA | {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["odd"] * 3}, "layer_types"),
        (
            LLAMA
            | {
                "architectures": ["Gemma3ForCausalLM"],
                "use_bidirectional_attention": True,
                "attn_logit_softcapping": 3.0,
            },
            "attn_logit_softcapping is not supported with use_bidirectional",
        ),
        (GEMMA4 | {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input 256 .* E2B and E4B"),
        (GEMMA4 | {"hidden_size_per_layer_input": None}, "hidden_size_per_layer_input 256 .* E2B and E4B"),
        (GEMMA4 | {"num_kv_shared_layers": 10}, "num_kv_shared_layers 10 is not supported"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (GEMMA4 | {"num_global_key_value_heads": 3}, "16 heads cannot share 3 key/value heads in layer 5"),
        (GEMMA4 | {"top_k_experts": 129}, "top_k_experts 129 is more than num_experts 128"),
        (GEMMA4 | {"num_experts": None}, "num_experts"),
        (GEMMA4 | {"hidden_activation": "relu"}, "hidden_activation 'relu' of experts"),
        (GEMMA4 | {"global_head_dim": 511}, "global_head_dim"),
        (GPT_OSS | {"num_experts_per_tok": 33}, "num_experts_per_tok 33 is more than num_local_experts 32"),
        (GPT_OSS | {"layer_types": ["full_attention"]}, "layer_types"),
        (GPT_OSS | {"swiglu_limit": 5.0}, "swiglu_alpha 1.702 and swiglu_limit 5 are not supported"),
        (GPT_OSS | {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA | {"architectures": ["Cohere2ForCausalLM"], "sliding_window_pattern": 0}, "sliding_window_pattern"),
        (
            LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1]},
            "no_rope_layers has 1 entries for 3",
        ),
        (LLAMA4 | {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 3 layers"),
        (LLAMA4 | {"layer_types": ["sliding_attention"] * 3}, "must name 3 of full_attention, chunked_attention"),
        (LLAMA4 | {"num_experts_per_tok": 17}, "num_experts_per_tok 17 is more than num_local_experts 16"),
        (LLAMA4 | {"moe_layers": [-1]}, "moe_layers"),
        (LLAMA4 | {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step"),
        (LLAMA4 | {"hidden_act": "gelu"}, "hidden_act 'gelu' of experts"),
        (LLAMA | {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 0}, "residual_multiplier"),
        (LLAMA | {"architectures": ["Starcoder2ForCausalLM"], "hidden_act": "tanh"}, "hidden_act 'tanh'"),
        (
            LLAMA | {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "x"},
            "text_config.model_type 'x'",
        ),
    ],
)
def test_refused_configs(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        build({key: value for key, value in config.items() if value is not None})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "fields", "windows"),
    [
        ("Phi3ForCausalLM", {"sliding_window": 9}, (9, 9, 9)),
        ("Phi3ForCausalLM", {}, (None, None, None)),
        ("Olmo3ForCausalLM", {"num_hidden_layers": 4}, (4096, 4096, 4096, None)),
        ("Cohere2ForCausalLM", {"sliding_window_pattern": 2, "sliding_window": 7}, (7, None, 7)),
        ("Cohere2ForCausalLM", {"sliding_window": 0}, (None, None, None)),
        ("Gemma2ForCausalLM", {}, (4096, None, 4096)),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 3, "sliding_window": 5}, (5, 5, None)),
        ("SmolLM3ForCausalLM", {"sliding_window": 5, "no_rope_layer_interval": 2}, (None, None, None)),
        (
            "SmolLM3ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 5, "no_rope_layer_interval": 2},
            (None, 5, None),
        ),
        ("Starcoder2ForCausalLM", {"sliding_window": 5}, (5, 5, 5)),
        ("Llama4ForCausalLM", {"num_hidden_layers": 4}, (8192, 8192, 8192, None)),
        ("Llama4ForCausalLM", {"no_rope_layers": [0, 1, 1], "attention_chunk_size": 7}, (None, 7, 7)),
        ("Llama4ForCausalLM", {"attention_chunk_size": None}, (None, None, None)),
    ],
)
def test_windows_of_layers(name: str, fields: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert build({**LLAMA, "architectures": [name], **fields}).shape.windows == windows


def test_shapes_that_differ_from_those_of_llama() -> None:
    gemma = build({**LLAMA, "architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 16}).shape.attention[0]
    assert (gemma.head_dim, gemma.rules.scale, gemma.rules.soft_cap) == (256, 0.25, 50.0)
    falcon = build(FALCON).shape.attention[0]
    assert (falcon.num_heads, falcon.kv_heads) == (4, 1)
    whole = build(FALCON | {"multi_query": False}).shape.attention[0]
    assert whole == replace(falcon, kv_heads=4)
    scaled = build(GPT2 | {"scale_attn_by_inverse_layer_idx": True}).shape.attention
    assert [layer.rules.scale for layer in scaled] == pytest.approx([8**-0.5, 8**-0.5 / 2])


def test_gemma4_as_released() -> None:
    """Also without what config.json may omit: then the last layer has no window either."""
    model = build(GEMMA4)
    near, wide = model.shape.attention[0], model.shape.attention[5]
    assert (near.kept, near.rules.window, near.rules.scale) == ((2, 8, 256), 1024, 1.0)
    assert (wide.kept, wide.rules.window, wide.rules.scale) == ((2, 2, 512), None, 1.0)
    assert len(model.shape.runs) == 10
    assert model.shape.max_positions == 262144
    assert model._embedding._factor == 53.0  # the root of 2816 is 53.07
    assert model.table.size_bytes / 2 == pytest.approx(25.2e9, rel=0.01)  # parameters
    short = {key: value for key, value in GEMMA4.items() if key not in ("layer_types", "sliding_window")}
    assert build(short | {"num_hidden_layers": 8}).shape.windows == (512,) * 5 + (None, 512, None)


@pytest.mark.parametrize(
    ("fields", "parameters", "layers"),
    [
        ({}, 20.9e9, 24),
        ({"quantization_config": None}, 20.9e9, 24),
        ({"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None}, 116.8e9, 36),  # the 120b model
    ],
)
def test_gpt_oss_as_released(fields: dict[str, Any], parameters: float, layers: int) -> None:
    model = build({key: value for key, value in (GPT_OSS | fields).items() if value is not None})
    assert model.shape.windows == (128, None) * (layers // 2)
    first = model.shape.attention[0]
    assert (first.num_heads, first.kept, first.rules.scale) == (64, (2, 8, 64), 0.125)
    assert first.rules.sinks is not None and first.rules.sinks.shape == (64,)
    assert model.shape.max_positions == 131072
    experts = layers * (fields.get("num_local_experts") or GPT_OSS["num_local_experts"]) * 3 * 2880**2
    bits = 16 if "quantization_config" in fields else 4 + 8 / 32  # in mxfp4, with a scale of 8 bits for 32
    expected = 2 * (parameters - experts) + experts * bits / 8
    assert model.table.size_bytes == pytest.approx(expected, rel=0.02)


def test_context_lengths() -> None:
    """Gemma 3 counts the scaling of its rotations in max_position_embeddings, others do not."""
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert build({**LLAMA, "architectures": ["Gemma3ForCausalLM"], **linear}).shape.max_positions == 256
    assert build({**LLAMA, "architectures": ["GraniteForCausalLM"], **linear}).shape.max_positions == 2048
    assert build(GPT2 | {"n_positions": 77}).shape.max_positions == 77


def test_embedding_factors_are_rounded_as_the_model() -> None:
    """The root of 2560 is 50.596; as bfloat16, in which Gemma was trained, it is 50.5."""
    model = build({**LLAMA, "architectures": ["Gemma3ForCausalLM"], "hidden_size": 2560})
    assert model._embedding._factor == 50.5


def test_windows_of_llama4_are_chunks() -> None:
    shapes = build({**LLAMA4, "no_rope_layers": [0, 1, 1]}).shape.attention
    assert [shape.rules.chunked for shape in shapes] == [False, True, True]
    assert not any(shape.rules.chunked for shape in build({**LLAMA4, "attention_chunk_size": 0}).shape.attention)
