"""The mock worker's half of the step protocol: attachment, numbering, and plans that wait for their turn."""

from collections import deque

from blockyard.services.gpu_worker.mock_batch import MockBatch, Pattern
from blockyard.shared.messages import Attach, Attached, Fenced, Geometry, OutOfStep, StepPlan, StepResult


class MockPlans:
    """Answers to frames come back from `attach` and `take`; a plan's comes from `complete`, once it is due."""

    def __init__(self, worker: int, geometry: Geometry, pattern: Pattern, step_s: float) -> None:
        self.num_steps = 0
        self._worker, self._geometry, self._pattern, self._step_s = worker, geometry, pattern, step_s
        self._scheduler: int | None = None
        self._depth = 0
        self._batch = MockBatch(geometry, 0, pattern)
        self._queue: deque[tuple[StepPlan, float]] = deque()  # and when each is done
        self._next = 1

    def attach(self, frame: Attach) -> Attached:
        self._scheduler, self._depth, self._next = frame.scheduler, frame.depth, 1
        self._queue.clear()
        self._batch = MockBatch(self._geometry, frame.num_slots, self._pattern)
        return Attached(self._worker, frame.scheduler, self._geometry)

    def take(self, plan: StepPlan, now: float) -> Fenced | OutOfStep | None:
        """Queues a plan. It starts when it has come and the one before is done."""
        if self._scheduler is not None and plan.scheduler != self._scheduler:
            return Fenced(plan.scheduler)
        if self._scheduler is None or plan.number != self._next or len(self._queue) > self._depth:
            expected, self._scheduler = self._next, None
            self._queue.clear()
            return OutOfStep(self._worker, expected)
        self._next += 1
        start = max(now, self._queue[-1][1]) if self._queue else now
        self._queue.append((plan, start + self._step_s))
        return None

    def due(self) -> float | None:
        """When the oldest plan is done."""
        return self._queue[0][1] if self._queue else None

    def complete(self, stamp_s: float) -> StepResult:
        """Runs the oldest plan. Raises PlanError if it contradicts what came before."""
        plan, _ = self._queue.popleft()
        self.num_steps += 1
        return StepResult(self._worker, plan.number, self._batch.step(plan), stamp_s, self._step_s)
