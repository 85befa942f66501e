"""Checkpoints of Qwen2's reward models, whose code is in their releases and not in transformers, and a reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import LLAMA, Tiny
from tiny_poolers import hidden_and_outputs
from torch import Tensor
from transformers import Qwen2Config, Qwen2Model

LABELS = {"Qwen2ForRewardModel": 1, "Qwen2ForProcessRewardModel": 2}
Reference = Callable[[list[int]], Tensor]  # ids -> logits [tokens, labels]


def save_reward_model(folder: Path, name: str, **fields: Any) -> Reference:
    """Saves a random model with this name in its config.json. fields: of the configuration."""
    tiny = Tiny("reward", Qwen2Config, Qwen2Model, LLAMA | fields, rewrite={"architectures": [name]})
    theirs = tiny.save(folder)
    torch.manual_seed(5)
    hidden, labels = LLAMA["hidden_size"], LABELS[name]
    sizes = {
        "score.0.weight": (hidden, hidden),
        "score.0.bias": (hidden,),
        "score.2.weight": (labels, hidden),
        "score.2.bias": (labels,),
    }
    head = {key: torch.randn(shape) * 0.3 for key, shape in sizes.items()}
    stored: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file({f"model.{key}": value for key, value in stored.items()} | head, folder / "model.safetensors")

    def logits(ids: list[int]) -> Tensor:
        states, _ = hidden_and_outputs(theirs, ids)
        inner = (states @ head["score.0.weight"].T + head["score.0.bias"]).relu()
        return inner @ head["score.2.weight"].T + head["score.2.bias"]

    return logits
