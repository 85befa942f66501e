"""Random adapters that PEFT writes over tiny checkpoints, and logits of a runner's model with an adapter."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from model_logits import all_logits
from transformers import PreTrainedModel

from blockyard.services.gpu_worker.lora.places import AdapterPlaces
from blockyard.services.gpu_worker.lora.read_adapter import AdapterLimits, read_adapter
from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.services.gpu_worker.runner import Runner

EXACT = AdapterLimits(dtype=torch.float32)


def save_adapter(
    base: PreTrainedModel, folder: Path, seed: int = 3, scale: float = 0.1, **fields: Any
) -> peft.PeftModel:
    """Adapts `base` in place with random matrices, and writes the adapter. fields: of LoraConfig."""
    config = peft.LoraConfig(**({"r": 5, "lora_alpha": 11, "init_lora_weights": False} | fields))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of uses of transformers that it deprecates, and of Conv1D
        model = peft.get_peft_model(base, config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_" in name or (value.requires_grad and name.endswith("bias")):
                    value.copy_(torch.randn(value.shape, generator=generator) * 0.1)
        model.save_pretrained(folder)
    return model.eval()


def peft_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(torch.tensor([ids])).logits[0])


def adapt(runner: Runner, *folders: Path, limits: AdapterLimits = EXACT) -> AdapterPlaces:
    """Puts the adapters of these folders into places 0, 1, ..."""
    linears = runner.model.linears()
    places, targets = AdapterPlaces(linears, runner.model.adapter_rows, len(folders)), ModelTargets(runner.model)
    for place, folder in enumerate(folders):
        places.put(place, read_adapter(folder, targets, limits)[0])
    return places


def adapted_logits(runner: Runner, ids: list[int], chunks: list[int], place: int | None) -> torch.Tensor:
    """As `all_logits`, with the adapter of a place; None: with none."""
    if place is None:
        return all_logits(runner, ids, chunks)
    model = runner.model
    forward, logits = model.forward, model.logits

    def begin(rows: int) -> None:
        model.adapter_rows.begin(torch.full((rows,), place, dtype=torch.int32))

    model.forward = lambda step: (begin(len(step.token_ids)), forward(step))[1]  # type: ignore[method-assign]
    model.logits = lambda hidden: (begin(len(hidden)), logits(hidden))[1]  # type: ignore[method-assign]
    try:
        return all_logits(runner, ids, chunks)
    finally:
        del model.forward, model.logits
        model.adapter_rows.end()
