"""Random checkpoints of every family and RoPE kind, small enough for a test, and runners on them."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_checkpoint import BASE, LLAMA, VOCAB, Tiny
from tiny_dense import DENSE
from tiny_latent import LATENT
from torch import Tensor
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    Llama4Config,
    Llama4ForCausalLM,
    Llama4ForConditionalGeneration,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, ReadModules, read_modules
from blockyard.services.gpu_worker.lora.read_prompt import PromptLimits, ReadPrompt, read_prompt
from blockyard.services.gpu_worker.models.interface import ModelShape
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import AdapterError

__all__ = ["BASE", "BY_NAME", "LLAMA", "MODELS", "VOCAB", "Tiny", "greedy_score", "model_shape", "settings", "start"]

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA4 = LLAMA | {
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "num_local_experts": 6,
    "attention_chunk_size": 20,
    "floor_scale": 16,
    "rms_norm_eps": 0.01,
}


def _llama(name: str, rope: dict[str, Any], old: bool = False, **fields: Any) -> Tiny:
    return Tiny(name, LlamaConfig, LlamaForCausalLM, LLAMA | fields, rope, old)


MODELS = [
    _llama("llama", {"rope_type": "default"}),
    _llama("llama-linear", {"rope_type": "linear", "factor": 2.5}),
    _llama("llama-linear-old", {"rope_type": "linear", "factor": 2.5}, old=True),
    _llama("llama-dynamic", {"rope_type": "dynamic", "factor": 3.0}),
    _llama("llama-llama3", {"rope_type": "llama3", **LLAMA3}),
    _llama("llama-llama3-old", {"rope_type": "llama3", **LLAMA3}, old=True),
    _llama("llama-yarn", {"rope_type": "yarn", **YARN}),
    _llama("llama-yarn-old", {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.1}, old=True),
    _llama("llama-odd", {"rope_type": "default"}, head_dim=24, attention_bias=True, mlp_bias=True),
    _llama("llama-tied", {"rope_type": "default"}, tie_word_embeddings=True, num_key_value_heads=4),
    Tiny("mistral-window", MistralConfig, MistralForCausalLM, LLAMA | {"sliding_window": 20}, {"rope_type": "default"}),
    Tiny("mistral", MistralConfig, MistralForCausalLM, LLAMA | {"sliding_window": None}, {"rope_type": "default"}),
    Tiny("qwen2", Qwen2Config, Qwen2ForCausalLM, LLAMA, {"rope_type": "default"}),
    Tiny(
        "qwen2-window",
        Qwen2Config,
        Qwen2ForCausalLM,
        LLAMA | {"use_sliding_window": True, "sliding_window": 17, "max_window_layers": 1},
        {"rope_type": "default"},
    ),
    Tiny("qwen3", Qwen3Config, Qwen3ForCausalLM, LLAMA | {"head_dim": 32}, {"rope_type": "default"}),
    Tiny("mixtral", MixtralConfig, MixtralForCausalLM, LLAMA | {"num_local_experts": 6}, {"rope_type": "default"}),
    Tiny(
        "qwen3-moe",
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        LLAMA | EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]},
        {"rope_type": "default"},
        seed=12,  # with 11 two experts are tied up to rounding at a token of the parity test
    ),
    Tiny(
        "granite-moe",
        GraniteMoeConfig,
        GraniteMoeForCausalLM,
        LLAMA
        | {"num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 12.0, "logits_scaling": 3.0}
        | {"residual_multiplier": 0.22, "attention_multiplier": 0.15},
        {"rope_type": "default"},
    ),
    Tiny(
        "glm4-moe",
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        LLAMA
        | EXPERTS
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "use_qk_norm": True, "routed_scaling_factor": 1.5}
        | {"attention_bias": True, "first_k_dense_replace": 1, "n_shared_experts": 2},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ),
    Tiny(
        "minimax-m2",
        MiniMaxM2Config,
        MiniMaxM2ForCausalLM,
        LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 32},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ),
    Tiny(  # without norms of q and k, as Maverick, and with dense layers
        "llama4",
        Llama4TextConfig,
        Llama4ForCausalLM,
        LLAMA4 | {"use_qk_norm": False, "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2},
        {"rope_type": "default"},
    ),
    Tiny(  # as Scout, within a model that also sees
        "llama4-sees",
        Llama4Config,
        Llama4ForConditionalGeneration,
        {
            "text_config": LLAMA4
            | {"no_rope_layers": [1, 1, 0], "num_experts_per_tok": 2, "attention_bias": True}
            | {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5000.0, "high_freq_factor": 1.0}},
            "vision_config": {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "vision_output_dim": 16, "image_size": 28}
            | {"projector_input_dim": 16, "projector_output_dim": 16},
        },
    ),
    Tiny(
        "olmoe", OlmoeConfig, OlmoeForCausalLM, LLAMA | EXPERTS | {"num_key_value_heads": 4}, {"rope_type": "default"}
    ),
    Tiny(
        "qwen2-moe",
        Qwen2MoeConfig,
        Qwen2MoeForCausalLM,
        LLAMA | EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2, "num_hidden_layers": 4},
        {"rope_type": "default"},
    ),
    Tiny(
        "gpt-oss",
        GptOssConfig,
        GptOssForCausalLM,
        LLAMA
        | {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 20}
        | {"head_dim": 32, "rms_norm_eps": 0.01},
        {"rope_type": "yarn", **YARN, "truncate": False},
    ),
    Tiny(
        "opt",
        OPTConfig,
        OPTForCausalLM,
        BASE | {"ffn_dim": 96, "max_position_embeddings": 256, "init_std": 0.2, "word_embed_proj_dim": 64},
    ),
    Tiny(
        "opt-350m-like",
        OPTConfig,
        OPTForCausalLM,
        BASE
        | {
            "ffn_dim": 96,
            "max_position_embeddings": 256,
            "init_std": 0.2,
            "word_embed_proj_dim": 32,
            "do_layer_norm_before": False,
        },
    ),
    *DENSE,
    *LATENT,
]
BY_NAME = {tiny.name: tiny for tiny in MODELS}


def model_shape(
    num_heads: int, kv_heads: int, head_dim: int, scale: float, windows: Sequence[int | None]
) -> ModelShape:
    """A model shape for attention tests: layers differ in their windows."""
    attention = tuple(
        AttentionShape(
            num_heads=num_heads, kv_heads=kv_heads, head_dim=head_dim, rules=ScoreRules(scale=scale, window=window)
        )
        for window in windows
    )
    return ModelShape(vocab_size=10, max_positions=128, attention=attention)


def settings(folder: Path, **fields: Any) -> WorkerConfig:
    bus = BusConfig(registry="ipc:///unused", bind="ipc:///unused")
    defaults = {
        "device": "cpu",
        "threads": 1,
        "num_gpu_blocks_override": 400,
        "block_size": 8,
        "dtype": "float32",
        "max_num_seqs": 32,
    }
    process = ProcessConfig(name="worker", bus=bus)
    return WorkerConfig(process=process, model_path=str(folder), **(defaults | fields))


def start(folder: Path, **fields: Any) -> Runner:
    return engine.start(settings(folder, **fields), lambda phase, progress, notes: None, make_reader=ReaderHere)


def greedy_score(model: PreTrainedModel) -> Any:
    """A score function for `Ties`: float64 logits of transformers' model."""
    exact = copy.deepcopy(model).double()

    def score(ids: list[int]) -> Tensor:
        with torch.no_grad():
            return exact(torch.tensor([ids], device=exact.device)).logits[0, -1]

    return score


class ReaderHere:
    """Implements `AdapterReader` in the process that asks, at once."""

    def __init__(self, limits: AdapterLimits, prompts: PromptLimits | None = None) -> None:
        self._limits, self._read = limits, list[tuple[int, ReadModules | str]]()
        self._prompt_limits, self._prompts = prompts, list[tuple[int, ReadPrompt | str]]()

    def ask(self, job: int, path: str, *, is_prompt: bool = False) -> None:
        try:
            if is_prompt:
                assert self._prompt_limits is not None
                self._prompts.append((job, read_prompt(Path(path), self._prompt_limits)))
            else:
                self._read.append((job, read_modules(Path(path), self._limits)))
        except AdapterError as e:
            if is_prompt:
                self._prompts.append((job, str(e)))
            else:
                self._read.append((job, str(e)))

    def receive(self) -> list[tuple[int, ReadModules | str]]:
        found, self._read = self._read, []
        return found

    def receive_prompts(self) -> list[tuple[int, ReadPrompt | str]]:
        found, self._prompts = self._prompts, []
        return found

    def close(self) -> None:
        """It holds nothing."""
