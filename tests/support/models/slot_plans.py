"""Plans for slots of a runner, written by hand, and their results."""

from typing import Any

import numpy as np
from plan_driver import as_bytes
from tiny_checkpoint import VOCAB

from blockyard.services.gpu_worker.interfaces import CompletedPlan
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling, SlotRun, SlotStart, StepPlan


def prompt_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, n).tolist()


def greedy(**fields: Any) -> Sampling:
    return Sampling(**({"max_tokens": 20, "temperature": 0.0, "ignore_eos": True} | fields))


def started(slot: int, prompt: list[int], sampling: Sampling, blocks: list[int], computed: int = 0) -> SlotStart:
    return SlotStart(slot, as_bytes(prompt), len(prompt), computed, blocks, sampling, 0)


def plan(number: int, *runs: int, **fields: Any) -> StepPlan:
    lists = {"ends": [], "starts": [], "blocks": [], "full_blocks": []} | fields
    return StepPlan(
        1, number, lists["ends"], lists["starts"], lists["blocks"], [SlotRun(s, 1) for s in runs], lists["full_blocks"]
    )


def collected(runner: Runner) -> dict[int, dict[int, Any]]:
    """Waits for all plans in flight: results by plan and slot."""
    return {done.plan.number: {r.slot: r for r in done.all_results} for done in completed(runner)}


def completed(runner: Runner) -> list[CompletedPlan]:
    found = []
    while runner.in_flight:
        found += runner.collect()
    return found
