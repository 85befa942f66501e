"""Writes the suite's models: true shapes without weights, and the demo's tokenizer extended to their vocabulary.

`model_configs/` has their config.json without what no text model reads, and without quantization: weights are bfloat16.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec

from blockyard.services.launcher.models.model_files import demo_folder
from blockyard.shared.config.text_part import text_part

CONFIGS = Path(__file__).parent / "model_configs"
SHAPES = tuple(sorted(file.stem for file in CONFIGS.glob("*.json")))


def architectures(name: str) -> list[str]:
    """Returns the architectures that a model's config.json names."""
    return [str(one) for one in read(name)["architectures"]]


def write(name: str, folder: Path) -> Path:
    """Writes config.json and a tokenizer into a new folder in `folder` and returns it."""
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    shutil.copy(CONFIGS / f"{name}.json", made / "config.json")
    shutil.copy(demo_folder() / "tokenizer_config.json", made)
    (made / "tokenizer.json").write_bytes(_tokenizer(text_part(read(name))["vocab_size"]))
    return made


def read(name: str) -> dict[str, Any]:
    return msgspec.json.decode((CONFIGS / f"{name}.json").read_bytes(), type=dict[str, Any])


def _tokenizer(num_tokens: int) -> bytes:
    """Returns the demo's tokenizer with a word for each further id.

    Random weights sample any id, and a token without text makes no stream event.
    """
    whole = msgspec.json.decode((demo_folder() / "tokenizer.json").read_bytes())
    vocab = whole["model"]["vocab"]
    vocab |= {f"\u0120w{i}": i for i in range(len(vocab), num_tokens)}  # U+0120 is a byte-level space
    return msgspec.json.encode(whole)
