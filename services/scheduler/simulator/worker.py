"""A simulated worker: it takes plans in order and says how long each step takes and what it returns."""

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from blockyard.services.scheduler.simulator.trace import OUTPUT_IDS, TraceRequest
from blockyard.shared.config.services.simulation import CostModel
from blockyard.shared.messages import (
    NO_TOKEN,
    Attach,
    Attached,
    FinishReason,
    Geometry,
    SlotResult,
    StepPlan,
    StepResult,
)
from blockyard.shared.token_ids import num_ids

CHOICES = 64  # output tokens differ between so many choices


class Pace:
    """Seconds of a step."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._known: dict[int, float] = {}

    def step_s(self, num_rows: int, context_tokens: int, pairs: int) -> float:
        cost = self._cost
        rows_s = self._known.get(num_rows)
        if rows_s is None:
            rows_s = self._known[num_rows] = _rows_s(cost, num_rows)
        return rows_s + cost.context_token_s * context_tokens + cost.pair_s * pairs

    def fetch_s(self, num_tokens: int) -> float:
        """Seconds that a step waits for the KV of so many tokens from host memory."""
        return self._cost.fetch_token_s * num_tokens


@dataclass(slots=True, eq=False)
class SimSlot:
    num_tokens: int  # that the device has
    num_computed: int
    end: int  # its number of tokens when it ends
    finish: FinishReason
    sampled: list[int]  # its tokens, one for each step
    finished: bool = False

    def compute(self, num_tokens: int) -> int:
        """Computes the next `num_tokens` tokens, as far as there are so many. Returns how many are computed in all."""
        self.num_computed = min(self.num_computed + num_tokens, self.num_tokens)
        return self.num_computed

    def sample(self, number: int) -> SlotResult:
        """The result of a step for slot `number`: a token if all tokens are computed."""
        if self.num_computed < self.num_tokens:
            return SlotResult(number, [], self.num_computed)
        self.num_tokens += 1
        self.finished = self.num_tokens >= self.end
        return SlotResult(number, self.sampled, self.num_computed, self.finish if self.finished else None)


class SimWorker:
    """`run` takes a plan and returns its result with the time at which the caller is to deliver it."""

    def __init__(self, incarnation: int, geometry: Geometry, pace: Pace, requests: Sequence[TraceRequest]) -> None:
        self.incarnation, self.geometry = incarnation, geometry
        self.busy_s = 0.0
        self.num_steps = 0
        self._pace, self._requests = pace, requests
        self._slots: dict[int, SimSlot] = {}
        self._free_at = 0.0

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def busy_until(self, now: float) -> float:
        """Seconds in which it has computed. Steps of plans that wait are in `busy_s`, and come later."""
        return self.busy_s - max(0.0, self._free_at - now)

    def stop(self, now: float) -> None:
        """It dies: what it would have computed later it does not."""
        self.busy_s, self._free_at = self.busy_until(now), now

    def attach(self, frame: Attach) -> Attached:
        self._slots = {}
        return Attached(frame.scheduler, self.geometry, number=frame.number)

    def run(self, plan: StepPlan, came_at: float) -> tuple[float, StepResult]:
        """The time when the step ends, and its result. Plans run one after the other."""
        self._apply(plan)
        slots, results = self._slots, []
        token_ids = array("I", [NO_TOKEN]) * len(plan.runs)
        num_rows = context_tokens = pairs = 0
        for i, run in enumerate(plan.runs):
            slot = slots[run.slot]
            before, granted = slot.num_computed, run.max_tokens
            num_rows += granted
            if slot.finished:
                continue
            if granted == 1:
                context_tokens += before
                slot.num_computed = before + 1
                if before + 1 == slot.num_tokens < slot.end - 1:
                    slot.num_tokens += 1
                    token_ids[i] = slot.sampled[0]
                    continue
            else:
                computed = slot.compute(granted)
                pairs += (computed - before) * (computed + before) // 2
            results.append(slot.sample(run.slot))
        step_s = self._pace.step_s(num_rows, context_tokens, pairs)
        step_s += self._pace.fetch_s(len(plan.fetches) * self.geometry.block_size)
        ends_at = self._free_at = max(self._free_at, came_at) + step_s
        self.busy_s += step_s
        self.num_steps += 1
        return ends_at, StepResult(plan.number, results, ends_at, step_s, token_ids=token_ids.tobytes())

    def _apply(self, plan: StepPlan) -> None:
        for number in plan.ends:
            del self._slots[number]
        for start in plan.starts:
            request = self._requests[start.sampling.seed]
            num_known = num_ids(start.token_ids)
            asked = start.num_prompt_tokens + start.sampling.max_tokens
            end = min(start.num_prompt_tokens + request.output_tokens, self.geometry.max_model_len)
            finish = FinishReason.LENGTH if end >= min(asked, self.geometry.max_model_len) else FinishReason.STOP
            sampled = [OUTPUT_IDS + (start.sampling.seed * CHOICES + start.choice) % OUTPUT_IDS]
            self._slots[start.slot] = SimSlot(num_known, start.num_computed, end, finish, sampled)


def _rows_s(cost: CostModel, num_rows: int) -> float:
    """Interpolates in the table: constant below its first point, `row_s` a row above the last one."""
    table = cost.rows_s
    if num_rows <= table[0][0]:
        return table[0][1]
    for (low, low_s), (high, high_s) in itertools.pairwise(table):
        if num_rows <= high:
            return low_s + (high_s - low_s) * (num_rows - low) / (high - low)
    last, last_s = table[-1]
    return last_s + cost.row_s * (num_rows - last)
