"""A random checkpoint of any decoder class of transformers, made small by the usual names of its settings."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from plan_driver import Driver
from ties import Ties
from tiny_models import greedy_score
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LAYERS, HEADS = 2, 4
ROTATED = ("qk_nope_head_dim", "qk_rope_head_dim")
SIZES: dict[str, tuple[str, ...]] = {  # value as text -> settings that have it
    "211": ("vocab_size",),
    "64": ("hidden_size", "d_model", "n_embd", "lru_width"),
    "2": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    "4": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
    ),
    "96": ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"),
    "256": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
    "6": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "16": ("head_dim", "global_head_dim", "v_head_dim", "state_size", "mamba_d_state", "mamba_d_head", *ROTATED),
    "32": ("moe_intermediate_size", "expert_ffn_hidden_size", "kv_lora_rank", "q_lora_rank"),
    "48": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "20": ("sliding_window", "attention_window_size"),
    "1": ("n_group", "topk_group", "eos_token_id"),
}
SMALL: dict[str, Any] = {name: int(size) for size, names in SIZES.items() for name in names} | {
    "bos_token_id": 0,
    "pad_token_id": None,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "mamba_n_heads": 8,
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
}
LATENT = {"num_key_value_heads": HEADS}  # keys of all heads are made from one latent vector
HUNYUAN = {"head_dim": 16, "rope_parameters": ROPE}
FULL = {"layer_types": ["full_attention"] * LAYERS}
CHANGED: dict[str, dict[str, Any]] = {  # of classes whose defaults are incomplete, or contradict the sizes
    **dict.fromkeys(("youtu", "minicpm3", "axk1", "axk2", "deepseek_v3", "glm4_moe_lite", "longcat_flash"), LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "dots3_note", "dots3_note_text"), LATENT),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe"), HUNYUAN),
    "gemma4_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_text": {"num_kv_shared_layers": 0},
    "bamba": {"attn_layer_indices": [0, 1], "num_hidden_layers": 4},
    "cohere_compass_text": FULL | {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT | {"num_experts_per_tok": 2},
    "dots1": {"layer_types": None, "n_shared_experts": 1, "first_k_dense_replace": 1, "num_experts_per_tok": 2}
    | {"norm_topk_prob": True, "n_routed_experts": 6},
    "emu3": {"pad_token_id": 3},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "gemma3n_text": FULL | {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "jamba": {"attn_layer_offset": 0, "attn_layer_period": 2},
    "laguna": {"num_attention_heads_per_layer": [HEADS] * LAYERS},
    "lfm2": {"layer_types": ["full_attention", "full_attention", "conv", "conv"], "num_hidden_layers": 4},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "ministral": {"rope_parameters": ROPE, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
    "modernbert-decoder": {"pad_token_id": 3},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": FULL,
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 16]},
    "xlnet": {"d_head": 16},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_config(kind: str, **changed: Any) -> Any:
    """The configuration of a class by its `model_type`. Raises what transformers raises for sizes that do not fit."""
    fields = _shrink(CONFIG_MAPPING[kind]().to_dict()) | CHANGED.get(kind, {}) | changed
    for name in ("transformers_version", "architectures", "dtype", "torch_dtype", "model_type"):
        fields.pop(name, None)
    return AutoConfig.for_model(kind, **fields)


def _shrink(fields: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "per_layer_config":  # of layers that are cut off
            continue
        if isinstance(value, dict) and name.endswith("_config"):
            made[name] = _shrink(value)
        elif name in SMALL and (value is not None or name == "pad_token_id"):
            made[name] = SMALL[name]
        elif name in ("layer_types", "mlp_layer_types", "layers_block_type") and isinstance(value, list):
            made[name] = (list(dict.fromkeys(value)) * LAYERS)[:LAYERS]  # one layer of each kind, if there are two
        elif isinstance(value, list) and name.endswith(("_per_layer", "_pattern", "no_rope_layers")):
            made[name] = value[:LAYERS]
        else:
            made[name] = value
    return made


def save_tiny(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **changed: Any) -> PreTrainedModel:
    """Writes the checkpoint and returns transformers' model, with its own attention and experts."""
    torch.manual_seed(11)
    made: Any = AutoModelForCausalLM  # its methods have no types
    model: PreTrainedModel = made.from_config(
        tiny_config(kind, **changed), attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if ("norm" in name or ".ln_" in name) and name.endswith("weight"):
                value.add_(torch.randn_like(value), alpha=0.1)
            elif value.dim() > 1 and value.is_floating_point() and float(value.float().std()) < 0.05:
                value.normal_(0, 0.15)
            elif name.endswith(("bias", "e_score_correction_bias")) and value.is_floating_point():
                value.normal_(0, 0.1)
    model.to(dtype).save_pretrained(folder)
    return model


def compare_tokens(name: str, runner: Runner, theirs: PreTrainedModel, dtype: torch.dtype, max_tokens: int = 8) -> str:
    """Compares greedy tokens of four sequences in one batch with those of transformers for each alone: as whole
    prompts, in chunks, and preempted. Raises AssertionError; returns a line to print."""
    sampling, ties = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), Ties(dtype)
    score = greedy_score(theirs)
    vocab, rng = theirs.config.get_text_config().vocab_size, np.random.default_rng(5)
    prompts = [rng.integers(7, vocab, n).tolist() for n in (1, 9, 30, 45)]
    for options, preempt_at in (({}, ()), ({"chunk": 7}, ()), ({"chunk": 11, "depth": 1}, (5,))):
        driver = Driver(runner, seed=3, **options)
        streams = [driver.add(prompt, sampling, preempt_at=preempt_at) for prompt in prompts]
        driver.run()
        for stream in streams:
            with torch.no_grad():
                logits = theirs(torch.tensor([stream.prompt + stream.output]), use_cache=False).logits[0]
            expected = logits.argmax(-1)[len(stream.prompt) - 1 : -1].tolist()
            ties.compare(name, stream.prompt, expected, stream.output, score)
    return ties.check()


def check_two_streams(theirs: Any, runner: Runner, device: str) -> None:
    """Asserts that two prompts in one batch, of a whole step and of one token, have the greedy tokens of `theirs`."""
    driver = Driver(runner, seed=3)
    sampling = Sampling(max_tokens=3, temperature=0.0, ignore_eos=True)
    streams = [driver.add(prompt, sampling) for prompt in ([5, 9, 11, 30], [7])]
    driver.run()
    for stream in streams:
        with torch.no_grad():
            logits = theirs(torch.tensor([stream.prompt + stream.output], device=device)).logits[0]
        assert stream.output == logits.argmax(-1)[len(stream.prompt) - 1 : -1].tolist()
