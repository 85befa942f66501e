"""Steps of a leader with several pipeline stages on the CPU: earlier stages compute a step while it computes another.

A launch tells the earlier stages of the step. The leader computes its own layers, and samples, when the step is
collected.
"""

import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.execution.cpu_steps import NOTHING, CpuSteps, PreparedStep
from blockyard.services.gpu_worker.execution.device_loop import LaunchedStep, StepRequest
from blockyard.services.gpu_worker.execution.device_slots import DeviceSlots
from blockyard.services.gpu_worker.execution.ranks.leader import LeaderModel
from blockyard.shared.messages import StepPlan

MOST_WAIT_S = 0.002  # for the next plan, before this stage computes: earlier stages have no step meanwhile
WAIT_SHARE = 0.125  # of the time of a step, at most


class PipelinedCpuSteps:
    """Implements `device_loop.DeviceSteps`."""

    runs_ahead = False  # the host computes the steps

    def __init__(self, steps: CpuSteps, model: LeaderModel, num_stages: int) -> None:
        """steps: of `model`."""
        self._steps, self._model, self._num_stages = steps, model, num_stages
        self.slots: DeviceSlots = steps.slots
        self.capacity, self.most_in_flight = steps.capacity, num_stages
        self._num_pending = 0  # launched and not computed
        self._in_flight: Counter[int] = Counter()  # slots of these
        self._sampling: Counter[int] = Counter()  # those that sample
        self._computed_s = 0.0  # when the last step was computed
        self._wait_s = 0.0

    def reset(self) -> None:
        """Drops all slots."""
        self._steps.reset()

    def idle(self) -> bool:
        """There is no background work."""
        return False

    def order(self, slots: Ints) -> None:
        self._steps.order(slots)

    def depends(self, plan: StepPlan) -> bool:
        """Whether a plan may not be applied yet: it needs tokens of steps that are not computed, or changes what they
        read."""
        if not self._num_pending:
            return False
        if plan.copies or plan.saves or plan.fetches:
            return True
        ends, runs = (*plan.ends, *(start.slot for start in plan.starts)), (run.slot for run in plan.runs)
        return not (self._in_flight.keys().isdisjoint(ends) and self._sampling.keys().isdisjoint(runs))

    def launch(self, step: StepRequest) -> LaunchedStep:
        prepared = self._steps.prepare(step)
        if prepared is None:
            return NOTHING
        self._model.announce(prepared.inputs, prepared.adapter_places)
        slots, sampling = step.rows.slots.tolist(), step.rows.slots[prepared.at_end].tolist()
        self._num_pending += 1
        self._in_flight.update(slots)
        self._sampling.update(sampling)
        unknown = np.zeros(len(slots), np.int64)

        def compute() -> None:
            began_s = time.perf_counter()
            found = self._compute(prepared)
            launched.results, launched.read_logprobs = found.results, found.read_logprobs
            launched.host_logits, launched.prompt_logprobs = found.host_logits, found.prompt_logprobs
            self._num_pending -= 1
            for counted, done in ((self._in_flight, slots), (self._sampling, sampling)):
                counted.subtract(done)
                for slot in done:
                    if not counted[slot]:
                        del counted[slot]
            self._computed_s = time.perf_counter()
            self._wait_s = min(MOST_WAIT_S, WAIT_SHARE * (self._computed_s - began_s))

        launched = LaunchedStep((unknown, unknown, unknown), PendingStep(compute, self._may_compute))
        return launched

    def _compute(self, prepared: PreparedStep) -> LaunchedStep:
        with torch.inference_mode():
            return self._steps.compute(prepared)

    def _may_compute(self) -> bool:
        """Plans of other sequences are launched first, if they come in time."""
        return self._num_pending >= self._num_stages or time.perf_counter() - self._computed_s >= self._wait_s


class PendingStep:
    """Implements `DeviceEvent`: passed once the step is computed, which it does itself when it is asked."""

    def __init__(self, compute: Callable[[], None], may_compute: Callable[[], bool]) -> None:
        self._compute, self._may_compute, self._is_done = compute, may_compute, False

    def record(self) -> None:
        """It is recorded by the launch."""

    def query(self) -> bool:
        if not self._is_done and self._may_compute():
            self.synchronize()
        return self._is_done

    def synchronize(self) -> None:
        if not self._is_done:
            self._is_done = True
            self._compute()
