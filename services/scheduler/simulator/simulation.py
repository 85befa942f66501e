"""The ring in virtual time: a heap of events and the real scheduler. Nothing waits for a clock."""

import heapq
from collections.abc import Callable, Sequence
from functools import partial

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.core import Scheduler
from blockyard.services.scheduler.from_config import settings_of
from blockyard.services.scheduler.outbox import Outgoing
from blockyard.services.scheduler.simulator.record import SimulationRecord, Snapshot
from blockyard.services.scheduler.simulator.trace import TraceRequest, frames
from blockyard.services.scheduler.simulator.transfers import SimTransfers
from blockyard.services.scheduler.simulator.worker import Pace, SimWorker
from blockyard.shared.config.services.simulation import SimulatedKill, SimulatedRole, SimulationConfig
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import (
    Attach,
    Generate,
    Geometry,
    KVAbort,
    KVReceive,
    KVRole,
    Member,
    Refused,
    Role,
    SchedulerIn,
    StepPlan,
    TokenBatch,
)

SCHEDULER, GATEWAY, DETOKENIZER, FIRST_WORKER = 1, 2, 3, 4
TICK_S = 0.25  # as in the service: the longest time between two steps of the core
SAMPLE_S = 0.01  # between samples, at first; a sample looks at all workers, so that many workers have fewer
STUCK_AFTER_S = 600.0  # without an event, though requests are open


class StuckError(BlockyardError):
    """Requests are open, and no event is left for them."""


class Simulation:
    def __init__(self, config: SimulationConfig, requests: Sequence[TraceRequest]) -> None:
        settings = settings_of(config.scheduler)
        self.core = Scheduler(SCHEDULER, settings, 0)
        self.record = SimulationRecord(
            requests, SAMPLE_S * max(1, sum(each.num_workers for each in config.fleet) // 50)
        )
        self.num_events = 0
        self.now = 0.0
        self.transfers = SimTransfers(config.cost, config.block_size, self._at, self._tell)
        self.lost_workers: list[SimWorker] = []
        self._config, self._requests, self._pace = config, requests, Pace(config.cost)
        self._next_worker = FIRST_WORKER
        self.num_workers = {each.role: each.num_workers for each in config.fleet}
        self.geometries = {each.role: _geometry(config, each) for each in config.fleet}
        self.workers: dict[int, SimWorker] = {}
        for role, num_workers in self.num_workers.items():
            for _ in range(num_workers):
                self._add_worker(self.geometries[role])
        self._hop_s, self._turn_s = config.cost.hop_s, config.cost.turn_s
        self._arrivals = zip(requests, frames(requests, settings.names[0], config.block_size), strict=True)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []  # time, order, what happens
        self._num_pushed = 0
        self._quiet_since = 0.0
        self.core.lifecycle.before_preempt.append(self._preempting)

    def run(self, is_hopeless: Callable[[], bool] | None = None) -> bool:
        """Runs until every request has ended, or until `is_hopeless`, which is asked now and then.

        Returns whether all have ended. Raises StuckError.
        """
        self._join()
        self._arrive()
        for kill in self._config.kills:
            self._at(kill.at_s, partial(self._kill, kill))
        while self.record.num_open:
            self._advance()
            self._happen()
            self._turn()
            if self.record.sample(self.now, self._look) and is_hopeless is not None and is_hopeless():
                return False
        return True

    @property
    def all_workers(self) -> list[SimWorker]:
        """With dead ones."""
        return [*self.workers.values(), *self.lost_workers]

    def busy_s(self) -> dict[KVRole, float]:
        """The seconds that all workers of a role have computed so far."""
        found = dict.fromkeys(self.num_workers, 0.0)
        for worker in self.all_workers:
            found[worker.geometry.kv_role] += worker.busy_until(self.now)
        return found

    def _add_worker(self, geometry: Geometry) -> int:
        """Returns its incarnation."""
        incarnation = self._next_worker
        self._next_worker += 1
        self.workers[incarnation] = SimWorker(incarnation, geometry, self._pace, self._requests)
        return incarnation

    def _join(self) -> None:
        self.core.on_member(Member("gateway", Role.API_GATEWAY, GATEWAY, "", ready=True), 0.0)
        self.core.on_member(Member("detokenizer", Role.DETOKENIZER, DETOKENIZER, "", ready=True), 0.0)
        for incarnation in self.workers:
            self._announce(incarnation)
        self._turn()
        self._happen()

    def _announce(self, incarnation: int) -> None:
        self.core.on_member(Member("worker", Role.GPU_WORKER, incarnation, "", ready=True), self.now)

    def _arrive(self) -> None:
        request, frame = next(self._arrivals, (None, None))
        if request is not None and frame is not None:
            self._at(request.arrival_s, partial(self._to_core, GATEWAY, frame))

    # deaths

    def _kill(self, kill: SimulatedKill, now: float) -> None:
        """The worker with the most running sequences dies; none does if the role has none."""
        alive = [worker for worker in self.workers.values() if worker.geometry.kv_role is kill.role]
        if not alive:
            return
        victim = max(alive, key=lambda worker: worker.num_slots)
        del self.workers[victim.incarnation]
        victim.stop(now)
        self.lost_workers.append(victim)
        self.transfers.on_lost(victim.incarnation, now)
        self.core.on_member_lost(victim.incarnation)
        self._at(now + self._config.restart_s, partial(self._replace, victim.geometry))

    def _replace(self, geometry: Geometry, now: float) -> None:
        self._announce(self._add_worker(geometry))

    # events

    def _at(self, when: float, happen: Callable[[float], None]) -> None:
        """`happen` is called with this time, in the order of times, before the next step of the core."""
        self._num_pushed += 1
        heapq.heappush(self._events, (when, self._num_pushed, happen))

    def _tell(self, when: float, worker: int, frame: SchedulerIn) -> None:
        self._at(when + self._hop_s, partial(self._to_core, worker, frame))

    def _to_core(self, peer: int, frame: SchedulerIn, _: float) -> None:
        """The frame may have come a while ago: the scheduler takes it now."""
        if peer >= FIRST_WORKER and peer not in self.workers:
            return  # its link broke with the frame on it
        self.core.on_message(peer, frame, self.now)
        if isinstance(frame, Generate):
            self._arrive()

    def _happen(self) -> None:
        events, now = self._events, self.now
        while events and events[0][0] <= now:
            self.num_events += 1
            when, _, happen = heapq.heappop(events)
            happen(when)

    def _advance(self) -> None:
        """Moves the time to the next event, timer or tick. The scheduler does not look before its step is over."""
        if self._events:
            next_s = self._events[0][0]
            wake_at = self.core.wake_at()
            if wake_at is not None and wake_at < next_s:
                next_s = wake_at
            self.now = self._quiet_since = max(next_s, self.now + self._turn_s)
            return
        self.now += TICK_S
        if self.now - self._quiet_since > STUCK_AFTER_S:
            raise StuckError(
                f"{self.record.num_open} requests are open at {self.now:.1f} s and nothing happens to them"
            )

    # frames of the scheduler

    def _turn(self) -> None:
        for outgoing in self.core.step(self.now):
            self._deliver(outgoing)

    def _deliver(self, outgoing: Outgoing) -> None:
        frame, to = outgoing.frame, outgoing.to
        match frame:
            case StepPlan():
                self._run(to, frame)
            case TokenBatch():
                self.record.tokens(frame, self.now)
            case KVReceive():
                self.transfers.receive(to, frame)
            case KVAbort():
                self._at(self.now + self._hop_s, partial(self.transfers.abort, to, frame))
            case Attach():
                self._at(self.now, partial(self._to_core, to, self.workers[to].attach(frame)))
            case Refused():
                self.record.refused(frame, self.now)

    def _run(self, worker: int, plan: StepPlan) -> None:
        ends_at, result = self.workers[worker].run(plan, self.now + self._hop_s)
        if plan.sends:
            self.transfers.send(plan.sends, ends_at - result.step_s, ends_at)
        self._tell(ends_at, worker, result)

    def _look(self) -> Snapshot:
        return Snapshot(self.core.stats().waiting, list(self.core.groups.values()), self.busy_s())

    def _preempting(self, group: WorkerGroup) -> None:
        self.record.before_preempt(group, self.now)


def _geometry(config: SimulationConfig, role: SimulatedRole) -> Geometry:
    num_blocks = role.num_blocks or config.num_blocks
    return Geometry(
        num_blocks,
        config.block_size,
        min(config.max_model_len, num_blocks * config.block_size),
        1 << 32,
        [],
        role.max_num_seqs or config.scheduler.max_num_seqs,
        role.max_num_batched_tokens or config.scheduler.max_num_batched_tokens,
        num_host_blocks=config.num_host_blocks if role.num_host_blocks is None else role.num_host_blocks,
        step_s=Pace(config.cost).step_s(1, 0, 0),
        kv_role=role.role,
        kv_layout=config.cost.name,
    )
