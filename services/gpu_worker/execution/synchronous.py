"""Synchronous execution: a plan is done when its launch returns."""

import time
from collections.abc import Callable

from blockyard.services.gpu_worker.interfaces import CompletedPlan
from blockyard.shared.messages import SlotResult, StepPlan


class SynchronousSteps:
    """Keeps completed plans until they are collected. run: executes a plan. failed: blocks of it whose fetch failed."""

    def __init__(self, run: Callable[[StepPlan], list[SlotResult]], failed: Callable[[StepPlan], list[int]]) -> None:
        self._run, self._failed = run, failed
        self._done: list[CompletedPlan] = []

    def __len__(self) -> int:
        return len(self._done)

    def launch(self, plan: StepPlan) -> None:
        start = time.perf_counter()
        slots = self._run(plan)
        self._done.append(CompletedPlan(plan, slots, time.time(), time.perf_counter() - start, self._failed(plan)))

    def collect(self) -> list[CompletedPlan]:
        done, self._done = self._done, []
        return done
