"""Texts of decoders that pool, by plans of their own: in order, in chunks that fill each step."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import settings
from torch import Tensor

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.execution.pooled_steps import PooledSteps
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import FinishReason, Sampling, SlotResult, SlotRun, SlotStart, StepPlan

BLOCK_SIZE = 16


def start_pooled(folder: Path, most_texts: int, most_tokens: int, **fields: Any) -> Runner:
    """A runner with blocks for `most_texts` of up to `most_tokens` each."""
    options = {
        "task": "embed",
        "max_model_len": most_tokens,
        "max_num_seqs": most_texts,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": most_texts * -(-most_tokens // BLOCK_SIZE),
    }
    runner = engine.start(settings(folder, **(options | fields)), lambda *_: None)
    assert isinstance(runner, Runner)
    return runner


def steps_of(runner: Runner) -> PooledSteps:
    steps = runner.loop.steps
    assert isinstance(steps, PooledSteps)
    return steps


def vectors(
    runner: Runner, texts: Sequence[Sequence[int]], budget: int, cached: Sequence[int] | None = None
) -> list[Tensor]:
    """The numbers of each text, float32, in steps of `budget` tokens. cached: leading tokens of each text with KV of an
    earlier call with the same texts; None: none has any."""
    blocks = -(-runner.geometry.max_model_len // BLOCK_SIZE)
    before = [0] * len(texts) if cached is None else list(cached)
    runner.reset(len(texts))
    results: list[SlotResult] = []
    for number, runs in enumerate(_chunks([len(text) - n for text, n in zip(texts, before, strict=True)], budget), 1):
        starts = [
            SlotStart(
                slot,
                np.array(texts[slot], "<u4").tobytes(),
                len(texts[slot]),
                before[slot],
                list(range(slot * blocks, slot * blocks + -(-len(texts[slot]) // BLOCK_SIZE))),
                Sampling(1),
                0,
                has_text=False,
            )
            for slot, _, is_first in runs
            if is_first
        ]
        plan = StepPlan(0, number, [], starts, [], [SlotRun(slot, count) for slot, count, _ in runs])
        results += runner.execute(plan)
    done = {result.slot: result for result in results if result.finish is not None}
    assert all(result.finish is FinishReason.STOP for result in done.values()), [one.detail for one in done.values()]
    return [torch.from_numpy(np.frombuffer(done[slot].vector, "<f4").copy()) for slot in range(len(texts))]


def _chunks(counts: Sequence[int], budget: int) -> Iterator[list[tuple[int, int, bool]]]:
    """The slot of each chunk of a step, its tokens, and whether it is the slot's first one."""
    step: list[tuple[int, int, bool]] = []
    left = budget
    for slot, count in enumerate(counts):
        first = 0
        while first < count:
            taken = min(count - first, left)
            step.append((slot, taken, first == 0))
            first, left = first + taken, left - taken
            if not left:
                yield step
                step, left = [], budget
    if step:
        yield step
