"""Random prompt adapters that PEFT writes over tiny checkpoints, and sequences of a runner that begin with them."""

import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import peft
import torch
from plan_driver import as_bytes
from transformers import PreTrainedModel

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling, SlotResult, SlotRun, SlotStart, StepPlan


def save_prompt(
    base: PreTrainedModel, folder: Path, num_tokens: int, encoded: bool = False, seed: int = 3
) -> peft.PeftModel:
    """Writes a prompt adapter of `base`. encoded: by P-tuning; False: by prompt tuning."""
    fields = {"task_type": "CAUSAL_LM", "num_virtual_tokens": num_tokens}
    config = (
        peft.PromptEncoderConfig(**fields, encoder_hidden_size=24) if encoded else peft.PromptTuningConfig(**fields)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of uses of transformers that it deprecates
        model = peft.get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.prompt_encoder.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    model.save_pretrained(folder)
    return model.eval()


def peft_logits(model: peft.PeftModel, ids: Sequence[int]) -> torch.Tensor:
    """At the positions of `ids`, without those of virtual tokens."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits = model(input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids))).logits[0]
    return torch.as_tensor(logits[-len(ids) :])


def load_prompts(runner: Runner, *folders: Path) -> list[str]:
    """Reads adapters into a runner: numbers 1, 2, ... Returns the error of each; empty: none."""
    adapters, done = runner.adapters, []
    assert adapters is not None
    for number, folder in enumerate(folders, 1):
        adapters.load(number, str(folder), is_prompt=True)
    while adapters.is_loading:
        done += adapters.poll()
        time.sleep(0.001)
    return [one.error for one in sorted(done, key=lambda one: one.adapter)]


def start_of(
    slot: int, ids: Sequence[int], sampling: Sampling, adapter: int | None = None, num_virtual: int = 0, **fields: int
) -> SlotStart:
    """A sequence in blocks of its own."""
    prompt = [0] * num_virtual + list(ids)
    blocks = list(range(slot * 8, slot * 8 + 8))
    return SlotStart(
        *(slot, as_bytes(prompt), len(prompt), 0, blocks, sampling, 0),
        prompt_adapter=adapter,
        num_virtual_tokens=num_virtual,
        **fields,
    )


def run_chunks(runner: Runner, starts: Sequence[SlotStart], chunk: int, steps: int) -> dict[int, list[SlotResult]]:
    """Runs plans in which each sequence computes at most `chunk` tokens. Returns the results of each slot."""
    found: dict[int, list[SlotResult]] = {one.slot: [] for one in starts}
    runs = [SlotRun(one.slot, chunk) for one in starts]
    for number in range(1, steps + 1):
        plan = StepPlan(1, number, [], list(starts) if number == 1 else [], [], runs)
        for result in runner.execute(plan):
            assert not result.detail, result.detail
            found[result.slot].append(result)
    return found


def tokens_of(results: Sequence[SlotResult]) -> list[int]:
    return [token for one in results for token in one.token_ids]
