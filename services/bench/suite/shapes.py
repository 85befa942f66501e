"""Writes the suite's models: true shapes without weights, and the demo's tokenizer extended to their vocabulary."""

import shutil
from pathlib import Path

import msgspec

from blockyard.services.launcher.models.model_files import demo_folder

LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA_ROPE,
    "vocab_size": 128256,
}
SHAPES: dict[str, dict[str, object]] = {
    "llama-3.1-8b": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "tie_word_embeddings": False},
    "llama-3.2-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
}


def write(name: str, folder: Path) -> Path:
    """Writes config.json and a tokenizer into a new folder in `folder` and returns it."""
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_bytes(msgspec.json.encode(SHAPES[name]))
    shutil.copy(demo_folder() / "tokenizer_config.json", made)
    (made / "tokenizer.json").write_bytes(_tokenizer(SHAPES[name]["vocab_size"]))
    return made


def _tokenizer(num_tokens: object) -> bytes:
    """Returns the demo's tokenizer with a word for each further id.

    Random weights sample any id, and a token without text makes no stream event.
    """
    assert isinstance(num_tokens, int), "a vocabulary's size"
    whole = msgspec.json.decode((demo_folder() / "tokenizer.json").read_bytes())
    vocab = whole["model"]["vocab"]
    vocab |= {f"\u0120w{i}": i for i in range(len(vocab), num_tokens)}  # U+0120 is a byte-level space
    return msgspec.json.encode(whole)
