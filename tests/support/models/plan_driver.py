"""A small scheduler for tests: drives a runner with plans, and can chunk, preempt and run ahead."""

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import (
    FinishReason,
    Sampling,
    SlotBlocks,
    SlotResult,
    SlotRun,
    SlotStart,
    StepPlan,
    TokenLogprobs,
)


def as_bytes(ids: list[int]) -> bytes:
    return np.array(ids, "<u4").tobytes()


@dataclass
class Stream:
    prompt: list[int]
    sampling: Sampling
    choice: int = 0
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    finish: FinishReason | None = None
    stop_token: int | None = None
    detail: str = ""
    status: int = 500
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    planned: int = 0  # tokens computed once all plans sent are done, at most
    computed: int = 0  # tokens computed, as of the last result
    known: int = 0  # tokens known once all plans sent are done, at most
    last_run: int = 0  # number of the last plan that ran it
    started: int = 0  # number of the plan that started its slot
    preempt_at: set[int] = field(default_factory=set)  # numbers of output tokens

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output


class Driver:
    """Owns slots and blocks of a runner. `depth` plans are queued besides the running one."""

    def __init__(
        self, runner: Runner, num_slots: int = 32, depth: int = 0, chunk: int = 10**6, seed: int | None = 0
    ) -> None:
        self.runner, self.depth, self.chunk = runner, depth, chunk
        runner.reset(num_slots)
        self.free_slots = list(range(num_slots))
        self.free_blocks = list(range(runner.geometry.num_blocks))
        if seed is not None:
            random.Random(seed).shuffle(self.free_blocks)
        self.streams: list[Stream] = []
        self.numbers = itertools.count(1)
        self.completed = 0
        self.num_waits = 0  # runs without a token
        self.preempted: dict[int, Stream] = {}  # by slot, until the plan that ends it is done
        self.queued: deque[StepPlan] = deque()
        self.ends: list[int] = []
        self.released: deque[tuple[int, list[int], list[int]]] = deque()  # after this plan: slots, blocks

    def add(self, prompt: list[int], sampling: Sampling, choice: int = 0, preempt_at: tuple[int, ...] = ()) -> Stream:
        stream = Stream(prompt, sampling, choice, preempt_at=set(preempt_at))
        self.streams.append(stream)
        return stream

    def run(self) -> None:
        while any(s.finish is None for s in self.streams):
            self.queued.append(self.plan())
            while len(self.queued) + self.runner.in_flight > self.depth:
                self.step()
        while self.queued or self.runner.in_flight:
            self.step()
        self.queued.append(self.plan())  # sends the ends of the last streams
        self.step()

    def plan(self) -> StepPlan:
        number = next(self.numbers)
        starts, blocks, runs = [], [], []
        for s in self.streams:
            if s.finish is not None:
                continue
            if s.slot is None and s.last_run <= self.completed:  # a preempted stream waits for its results
                if not self.free_slots:
                    continue
                s.slot, s.planned, s.computed = self.free_slots.pop(0), 0, 0
                s.num_tokens, s.started = len(s.ids), number
                s.blocks = self._take(1)
                starts.append(
                    SlotStart(
                        s.slot,
                        as_bytes(s.ids),
                        len(s.prompt),
                        0,
                        list(s.blocks),
                        s.sampling,
                        s.choice,
                        max(s.prompt_logprobs, default=-1) + 1,
                    )
                )
            if s.slot is None:
                continue
            count = min(s.num_tokens - s.planned, self.chunk)
            if count <= 0:
                continue
            s.planned += count
            s.num_tokens += s.planned == s.num_tokens
            need = -(-s.planned // self.runner.geometry.block_size) - len(s.blocks)
            if need > 0:
                more = self._take(need)
                s.blocks += more
                blocks.append(SlotBlocks(s.slot, more))
            s.last_run = number
            runs.append(SlotRun(s.slot, count))
        ends, self.ends = self.ends, []
        return StepPlan(1, number, ends, starts, blocks, runs)

    def step(self) -> None:
        """Launches all plans that it can, and waits for at least one result."""
        while self.queued and self.runner.can_launch():
            self.runner.launch(self.queued.popleft())
        while not (done := self.runner.collect()):
            pass
        for one in done:
            self._take_results(one.plan, one.all_results)

    def _take_results(self, plan: StepPlan, results: list[SlotResult]) -> None:
        assert plan.number == self.completed + 1
        self.completed = plan.number
        by_slot = {s.slot: s for s in self.streams if s.slot is not None}
        self._take_back(plan, results, by_slot)
        for result in results:
            if result.slot in by_slot and by_slot[result.slot].started <= plan.number:
                self._take_result(by_slot[result.slot], result)
            elif result.slot in self.preempted:  # tokens of a plan in flight still belong to the stream
                self._take_result(self.preempted[result.slot], result)
        while self.released and self.released[0][0] <= plan.number:
            _, slots, blocks = self.released.popleft()
            del self.preempted[slots[0]]
            self.free_slots += slots
            self.free_blocks += blocks

    def _take_back(self, plan: StepPlan, results: list[SlotResult], by_slot: dict[int, Stream]) -> None:
        """Tokens that a waiting slot did not compute are planned again."""
        num_computed = {result.slot: result.num_computed for result in results}
        for run in plan.runs:
            s = by_slot.get(run.slot)
            if s is not None and s.started <= plan.number:
                computed = num_computed.get(run.slot, s.computed)
                missing = run.max_tokens - (computed - s.computed)
                s.computed = computed
                s.planned -= missing
                s.num_tokens -= missing > 0
                self.num_waits += missing > 0

    def _take_result(self, s: Stream, result: SlotResult) -> None:
        assert s.finish is None, "a finished slot must stay silent"
        s.output += result.token_ids
        s.logprobs += result.logprobs
        for i, entry in enumerate(result.prompt_logprobs):
            assert result.first_prompt + i not in s.prompt_logprobs
            s.prompt_logprobs[result.first_prompt + i] = entry
        s.finish, s.stop_token, s.detail, s.status = result.finish, result.stop_token, result.detail, result.status
        if s.slot is not None and (s.finish is not None or len(s.output) in s.preempt_at):
            s.preempt_at.discard(len(s.output))
            self._release(s)

    def _release(self, s: Stream) -> None:
        """Frees slot and blocks when the plan that ends the slot is done; until then later plans may hold it."""
        assert s.slot is not None
        self.ends.append(s.slot)
        self.preempted[s.slot] = s
        number = next(self.numbers)
        self.numbers = itertools.count(number)
        self.released.append((number, [s.slot], s.blocks))
        s.slot, s.blocks = None, []

    def _take(self, count: int) -> list[int]:
        assert len(self.free_blocks) >= count, "the test's pool is too small"
        taken, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        return taken
