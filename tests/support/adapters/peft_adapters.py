"""Random adapters that PEFT writes over tiny checkpoints, and logits of a runner's model with an adapter."""

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from model_logits import all_logits
from placed_adapters import adapt_model
from plan_driver import as_bytes
from slot_plans import greedy, prompt_of
from transformers import PreTrainedModel

from blockyard.services.gpu_worker.interfaces import LoadedAdapter
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import AdapterPlaced, Sampling, SlotResult, SlotRun, SlotStart, StepPlan


def save_adapter(
    base: PreTrainedModel,
    folder: Path,
    seed: int = 3,
    trained_rows: Sequence[int] = (),
    saves_embedding: bool | str = "auto",
    **fields: Any,
) -> peft.PeftModel:
    """Adapts `base` in place with random matrices, and writes the adapter. fields: of LoraConfig. trained_rows: of
    `modules_to_save`. saves_embedding: see `save_embedding_layers` of PEFT."""
    config = peft.LoraConfig(**({"r": 5, "lora_alpha": 11, "init_lora_weights": False} | fields))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of uses of transformers that it deprecates, and of Conv1D
        model = peft.get_peft_model(base, config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in model.named_parameters():
                is_bias = value.requires_grad and name.endswith("bias")
                random = torch.randn(value.shape, generator=generator) * 0.1
                if is_bias or "lora_" in name or "trainable_tokens_delta" in name:
                    value.copy_(random)
                elif "modules_to_save" in name:
                    value[list(trained_rows)] = random[list(trained_rows)]
        model.save_pretrained(folder, save_embedding_layers=saves_embedding)
    return model.eval()


def peft_logits(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(torch.tensor([ids])).logits[0])


def adapt(runner: Runner, *folders: Path) -> None:
    """Puts the adapters of these folders into places 0, 1, ..."""
    adapt_model(runner.model, folders)


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


def load_adapters(runner: Runner, folders: Sequence[Path]) -> list[LoadedAdapter]:
    """Reads adapters into the host memory of a runner: numbers 1, 2, ..."""
    adapters, done = runner.adapters, []
    assert adapters is not None
    for number, folder in enumerate(folders, 1):
        adapters.load(number, str(folder))
    while adapters.is_loading:
        done += adapters.poll()
        time.sleep(0.001)
    errors = [one.error for one in done]
    assert errors == [""] * len(folders), errors
    assert len({one.digest for one in done}) == len(folders)
    return sorted(done, key=lambda one: one.adapter)


class Batch:
    """One sequence for each of `places`, which begin in the same step."""

    def __init__(
        self,
        runner: Runner,
        places: Sequence[int | None],
        placed: Sequence[AdapterPlaced],
        sampling: Sampling | None = None,
        prompts: Sequence[list[int]] = (),
        num_added: int = 0,
    ) -> None:
        """places: of the sequences' adapters. placed: by the first plan. num_added: tokens that each adapter adds."""
        self._runner, self._placed = runner, list(placed)
        self._starts, self._runs = list[SlotStart](), list[SlotRun]()
        for slot, place in enumerate(places):
            ids = prompts[slot] if prompts else prompt_of(9 + slot, 50 + slot)
            blocks, wanted = list(range(slot * 8, slot * 8 + 8)), sampling or greedy(num_logprobs=2)
            columns = slot, as_bytes(ids), len(ids), 0, blocks, wanted, 0
            added = 0 if place is None else num_added
            self._starts.append(SlotStart(*columns, adapter_place=place, num_added_tokens=added))
            self._runs.append(SlotRun(slot, len(ids)))

    def first(self) -> list[SlotResult]:
        """The step that computes the prompts."""
        starts, runs = self._starts, self._runs
        return self._runner.execute(StepPlan(1, 1, [], starts, [], runs, adapters=self._placed))

    def run(self, steps: int) -> list[list[tuple[list[int], float]]]:
        """Tokens and their log-probabilities, by sequence."""
        found: list[list[tuple[list[int], float]]] = [[] for _ in self._starts]
        for number in range(1, steps + 1):
            runs = [SlotRun(one.slot, 1) for one in self._runs]
            results = self.first() if number == 1 else self._runner.execute(StepPlan(1, number, [], [], [], runs))
            for result in results:
                assert not result.detail, result.detail
                found[result.slot].append((result.token_ids, result.logprobs[0].logprob))
        return found
