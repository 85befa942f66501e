"""The ring in virtual time: a heap of events and the real scheduler. Nothing waits for a clock."""

import heapq
from collections.abc import Sequence

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.core import Scheduler
from blockyard.services.scheduler.from_config import settings_of
from blockyard.services.scheduler.outbox import Outgoing
from blockyard.services.scheduler.simulator.record import SimulationRecord
from blockyard.services.scheduler.simulator.trace import TraceRequest, frames
from blockyard.services.scheduler.simulator.worker import Pace, SimWorker
from blockyard.shared.config.services.simulation import SimulationConfig
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import (
    Attach,
    Generate,
    Geometry,
    Member,
    Refused,
    Role,
    SchedulerIn,
    StepPlan,
    TokenBatch,
)

SCHEDULER, GATEWAY, DETOKENIZER, FIRST_WORKER = 1, 2, 3, 4
TICK_S = 0.25  # as in the service: the longest time between two steps of the core
STUCK_AFTER_S = 600.0  # without an event, though requests are open


class StuckError(BlockyardError):
    """Requests are open, and no event is left for them."""


class Simulation:
    def __init__(self, config: SimulationConfig, requests: Sequence[TraceRequest]) -> None:
        settings = settings_of(config.scheduler)
        self.core = Scheduler(SCHEDULER, settings, 0)
        self.record = SimulationRecord(requests)
        self.num_events = 0
        self.now = 0.0
        limits = settings.batch
        pace, first = Pace(config.cost), FIRST_WORKER
        geometry = Geometry(
            config.num_blocks,
            config.block_size,
            min(config.max_model_len, config.num_blocks * config.block_size),
            1 << 32,
            [],
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            num_host_blocks=config.num_host_blocks,
            step_s=pace.step_s(1, 0, 0),
        )
        self.workers = {first + i: SimWorker(first + i, geometry, pace, requests) for i in range(config.num_workers)}
        self._hop_s = config.cost.hop_s
        self._arrivals = iter(zip(requests, frames(requests, settings.names[0]), strict=True))
        self._events: list[tuple[float, int, int, SchedulerIn]] = []  # time, order, sender, frame
        self._num_pushed = 0
        self._quiet_since = 0.0
        self.core.before_preempt.append(self._preempting)

    def run(self) -> None:
        """Runs until every request has ended. Raises StuckError."""
        self._join()
        self._arrive()
        while self.record.num_open:
            self._advance()
            while self._events and self._events[0][0] <= self.now:
                _, _, peer, frame = heapq.heappop(self._events)
                self.num_events += 1
                self.core.on_message(peer, frame, self.now)
                if isinstance(frame, Generate):
                    self._arrive()
            self._turn()
            self.record.sample(self.now, self._look)

    def _join(self) -> None:
        self.core.on_member(Member("gateway", Role.API_GATEWAY, GATEWAY, "", ready=True), 0.0)
        self.core.on_member(Member("detokenizer", Role.DETOKENIZER, DETOKENIZER, "", ready=True), 0.0)
        for incarnation in self.workers:
            self.core.on_member(Member("worker", Role.GPU_WORKER, incarnation, "", ready=True), 0.0)
        self._turn()
        while self._events:
            _, _, peer, frame = heapq.heappop(self._events)
            self.core.on_message(peer, frame, 0.0)

    def _arrive(self) -> None:
        """Adds the next arrival to the events."""
        request, frame = next(self._arrivals, (None, None))
        if request is not None and frame is not None:
            self._push(request.arrival_s, GATEWAY, frame)

    def _push(self, when: float, peer: int, frame: SchedulerIn) -> None:
        self._num_pushed += 1
        heapq.heappush(self._events, (max(when, self.now), self._num_pushed, peer, frame))

    def _advance(self) -> None:
        """Moves the time to the next event, timer or tick."""
        if self._events:
            self.now = self._quiet_since = self._events[0][0]
            wake_at = self.core.wake_at()
            if wake_at is not None and wake_at < self.now:
                self.now = wake_at
            return
        self.now += TICK_S
        if self.now - self._quiet_since > STUCK_AFTER_S:
            raise StuckError(
                f"{self.record.num_open} requests are open at {self.now:.1f} s and nothing happens to them"
            )

    def _turn(self) -> None:
        for outgoing in self.core.step(self.now):
            self._deliver(outgoing)

    def _deliver(self, outgoing: Outgoing) -> None:
        frame = outgoing.frame
        match frame:
            case StepPlan():
                worker = self.workers[outgoing.to]
                ends_at, result = worker.run(frame, self.now + self._hop_s)
                self._push(ends_at + self._hop_s, outgoing.to, result)
            case TokenBatch():
                self.record.tokens(frame, self.now)
            case Attach():
                self._push(self.now, outgoing.to, self.workers[outgoing.to].attach(frame))
            case Refused():
                self.record.refused(frame, self.now)

    def _look(self) -> tuple[int, list[WorkerGroup]]:
        return self.core.stats().waiting, list(self.core.groups.values())

    def _preempting(self, group: WorkerGroup) -> None:
        self.record.before_preempt(group, self.now)
