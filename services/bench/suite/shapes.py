"""Writes the suite's models: true shapes without weights, and the demo's tokenizer extended to their vocabulary.

`model_configs/` has their config.json without what no text model reads, and without quantization: weights are bfloat16.
`VARIANTS` are such models with other fields: quantized, with fewer layers,
or with another head.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec

from blockyard.services.launcher.models.model_files import demo_folder
from blockyard.shared.config.text_part import text_part
from blockyard.shared.errors import ConfigError

CONFIGS = Path(__file__).parent / "model_configs"
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_W4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
_MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_HQQ = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64, "axis": 1}}}
_RERANKER = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # the model, and fields of config.json in place of its own
    "llama-3.1-8b-fp8": ("llama-3.1-8b", {"quantization_config": _FP8}),
    "llama-3.1-8b-w4": ("llama-3.1-8b", {"quantization_config": _W4}),
    "llama-3.1-8b-nf4": ("llama-3.1-8b", {"quantization_config": _NF4}),
    "llama-3.1-8b-hqq": ("llama-3.1-8b", {"quantization_config": _HQQ}),
    "llama-3.1-8b-q4-k": ("llama-3.1-8b", {"quantization_config": {"quant_method": "gguf"}}),
    "llama-3.3-70b-w4": ("llama-3.3-70b", {"quantization_config": _W4}),
    "llama-3.3-70b-fp8": ("llama-3.3-70b", {"quantization_config": _FP8}),
    "gpt-oss-120b-mxfp4": ("gpt-oss-120b", {"quantization_config": _MXFP4}),
    "bge-base-en-v1.5-reranker": ("bge-base-en-v1.5", _RERANKER),
    "qwen3-30b-a3b-fp8": ("qwen3-30b-a3b", {"quantization_config": _FP8}),
    "qwen3-30b-a3b-w4": ("qwen3-30b-a3b", {"quantization_config": _W4}),
    "gpt-oss-20b-mxfp4": ("gpt-oss-20b", {"quantization_config": _MXFP4}),
    "deepseek-v3-5-layers": ("deepseek-v3", {"num_hidden_layers": 5}),
    "deepseek-v3-5-layers-fp8": (
        "deepseek-v3",
        {"num_hidden_layers": 5, "quantization_config": _FP8 | {"fmt": "e4m3", "weight_block_size": [128, 128]}},
    ),
}
SHAPES = tuple(sorted([*(file.stem for file in CONFIGS.glob("*.json")), *VARIANTS]))


def architectures(name: str) -> list[str]:
    """Returns the architectures that a model's config.json names."""
    return [str(one) for one in read(name)["architectures"]]


def write(name: str, folder: Path) -> Path:
    """Writes config.json and a tokenizer into a new folder in `folder` and returns it."""
    return _write(read(name), folder / name)


def find(model: str, folder: Path) -> Path:
    """Returns the folder of a model: of `SHAPES`, the demo's, or one that has config.json; without a tokenizer, a copy
    in `folder` with one. Raises ConfigError."""
    if model in SHAPES:
        return write(model, folder)
    found = demo_folder() if model == "demo" else Path(model)
    if (found / "tokenizer.json").is_file():
        return found
    try:
        config = msgspec.json.decode((found / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"{model}: a folder with config.json, or one of demo, {', '.join(SHAPES)}: {e}") from e
    return _write(config, folder / found.name)


def _write(config: dict[str, Any], made: Path) -> Path:
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(config)))
    shutil.copy(demo_folder() / "tokenizer_config.json", made)
    (made / "tokenizer.json").write_bytes(_tokenizer(text_part(config)["vocab_size"]))
    return made


def read(name: str) -> dict[str, Any]:
    """Returns config.json."""
    model, others = VARIANTS.get(name, (name, {}))
    return msgspec.json.decode((CONFIGS / f"{model}.json").read_bytes(), type=dict[str, Any]) | others


def _tokenizer(num_tokens: int) -> bytes:
    """Returns the demo's tokenizer with a word for each further id.

    Random weights sample any id, and a token without text makes no stream event.
    """
    whole = msgspec.json.decode((demo_folder() / "tokenizer.json").read_bytes())
    vocab = whole["model"]["vocab"]
    vocab |= {f"\u0120w{i}": i for i in range(len(vocab), num_tokens)}  # U+0120 is a byte-level space
    return msgspec.json.encode(whole)
