"""For runners that compute where they are called: a plan is done when its launch returns."""

import time
from collections.abc import Callable

from blockyard.services.gpu_worker.interfaces import CompletedPlan
from blockyard.shared.messages import SlotResult, StepPlan


class SynchronousSteps:
    """Keeps what `run` made of plans until it is collected; `failed` then says which blocks could not be fetched."""

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
