"""The record of a simulation: each request, the times between tokens, and queue, batch and blocks over time."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.simulator.trace import TraceRequest
from blockyard.shared.messages import KVRole, Refused, TokenBatch
from blockyard.shared.token_ids import unpack

MAX_SAMPLES = 1000  # above it, every second sample is dropped and sampling is half as frequent


@dataclass(slots=True)
class Flow:
    """One request. Times are virtual."""

    request: TraceRequest
    last_s: list[float | None]  # time of the last token, by choice
    num_open: int  # choices
    first_s: float | None = None  # time of its first token
    second_gap_s: float | None = None  # between the first two tokens of the first choice that has two
    ended_s: float | None = None
    num_cached_tokens: int = 0
    refused: int = 0  # HTTP status
    detail: str = ""  # why it failed

    def on_first_token(self, now: float, num_cached_tokens: int) -> None:
        self.first_s, self.num_cached_tokens = now, num_cached_tokens

    def on_second_token(self, gap_s: float) -> None:
        self.second_gap_s = gap_s

    def on_choice_ended(self, now: float, detail: str) -> bool:
        """Whether it was the last choice."""
        self.detail = self.detail or detail
        self.num_open -= 1
        if not self.num_open:
            self.ended_s = now
        return not self.num_open

    def on_refused(self, now: float, status: int, detail: str) -> None:
        self.refused, self.detail, self.ended_s = status, detail, now

    def is_late(self, now: float, limit_s: float) -> bool:
        """Whether its first token came, or will come, later than `limit_s` after its arrival."""
        return (now if self.first_s is None else self.first_s) - self.request.arrival_s > limit_s

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.request.arrival_s


@dataclass(slots=True)
class Gaps:
    """The time between two tokens of a choice, and when the later one came."""

    at_s: "array[float]" = field(default_factory=lambda: array("d"))
    gap_s: "array[float]" = field(default_factory=lambda: array("d"))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state from which a sample is taken."""

    num_waiting: int  # sequences
    groups: list[WorkerGroup]
    busy_s: dict[KVRole, float]  # that all workers of a role have computed so far


@dataclass(frozen=True, slots=True)
class RoleSample:
    """The use of all workers of a role."""

    num_workers: int
    busy_s: float  # so far
    used: float  # share of their blocks


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    waiting: int
    running: list[int]  # by worker
    used: float  # share of all blocks
    unfilled: float  # share of the used blocks that no token will fill
    output_tokens: int  # so far
    roles: dict[KVRole, RoleSample]


@dataclass(frozen=True, slots=True)
class FirstPreemption:
    """The state of the worker just before its first preemption."""

    at_s: float
    used: float
    unfilled: float


class SimulationRecord:
    """Receives the frames of gateways and detokenizers. It does not influence the simulation."""

    def __init__(self, requests: Sequence[TraceRequest], every_s: float) -> None:
        """`every_s`: virtual time between samples, at first."""
        self.flows = [Flow(request, [None] * request.n, request.n) for request in requests]
        self.gaps: dict[str, Gaps] = {request.tenant: Gaps() for request in requests}
        self.samples: list[Sample] = []
        self.first_preemption: FirstPreemption | None = None
        self.num_open = len(self.flows)
        self._streams: dict[int, tuple[Flow, int]] = {}  # request and choice, by the scheduler's stream id
        self.num_output_tokens = 0
        self._every_s = every_s
        self._next_s = 0.0

    def tokens(self, batch: TokenBatch, now: float) -> None:
        for opened in batch.opens:
            self._streams[opened.stream] = (self.flows[int(opened.request_id)], opened.choice)
        for rows in batch.rows:
            for stream in unpack(rows.streams):
                self._token(*self._streams[stream], 1, now)
        for step in batch.steps:
            flow = self.flows[int(step.request_id)]
            if step.token_ids:
                if flow.first_s is None:
                    flow.on_first_token(now, step.cached_tokens)
                self._token(flow, step.choice, len(step.token_ids), now)
            if step.finish is not None and flow.on_choice_ended(now, step.detail):
                self.num_open -= 1

    def _token(self, flow: Flow, choice: int, num_tokens: int, now: float) -> None:
        self.num_output_tokens += num_tokens
        last, flow.last_s[choice] = flow.last_s[choice], now
        if last is not None:
            if flow.second_gap_s is None:
                flow.on_second_token(now - last)
            found = self.gaps[flow.request.tenant]
            found.at_s.append(now)
            found.gap_s.append(now - last)

    def refused(self, frame: Refused, now: float) -> None:
        self.flows[int(frame.request_id)].on_refused(now, frame.status, frame.message)
        self.num_open -= 1

    def before_preempt(self, group: WorkerGroup, now: float) -> None:
        """Called before a sequence is preempted."""
        if self.first_preemption is None:
            pool = group.kv_cache.blocks
            self.first_preemption = FirstPreemption(now, pool.num_used / pool.num_ids, self._unfilled([group]))

    def sample(self, now: float, look: Callable[[], Snapshot]) -> bool:
        """Takes a sample if one is due, and returns whether it was."""
        if now < self._next_s:
            return False
        snapshot = look()
        groups = snapshot.groups
        by_role = {role: [g for g in groups if g.geometry.kv_role is role] for role in snapshot.busy_s}
        roles = {
            role: RoleSample(len(found), snapshot.busy_s[role], _used(found))
            for role, found in by_role.items()
            if found
        }
        used = next(iter(roles.values())).used if len(roles) == 1 else _used(groups)
        running = [len(group.running) for group in groups]
        unfilled = self._unfilled(groups)
        self.samples.append(Sample(now, snapshot.num_waiting, running, used, unfilled, self.num_output_tokens, roles))
        if len(self.samples) > MAX_SAMPLES:
            del self.samples[1::2]
            self._every_s *= 2
        self._next_s = now + self._every_s
        return True

    def _unfilled(self, groups: list[WorkerGroup]) -> float:
        """The share of token slots in used blocks that lie after the last token of their sequence."""
        wasted = slots = 0
        for group in groups:
            slots += group.kv_cache.blocks.num_used * group.kv_cache.blocks.block_size
            for running in group.running:
                request = self.flows[int(running.sequence.request.id)].request
                wasted += max(0, running.table.capacity - (request.prompt_tokens + request.output_tokens - 1))
        return wasted / slots if slots else 0.0


def _used(groups: list[WorkerGroup]) -> float:
    """The share of their blocks that is in use."""
    total = sum(group.kv_cache.blocks.num_ids for group in groups)
    return sum(group.kv_cache.blocks.num_used for group in groups) / max(total, 1)
