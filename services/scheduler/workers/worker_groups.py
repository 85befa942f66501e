"""A worker group: its batch, its blocks and slots, and the plans it has not answered yet."""

import math
from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from blockyard.services.scheduler.batch.decode_batch import DecodeBatch
from blockyard.services.scheduler.batch.plan_pacer import MAX_PLANS_AHEAD, SEND_AHEAD_S, PlanPacer
from blockyard.services.scheduler.batch.plan_record import PlanRecord
from blockyard.services.scheduler.kv_cache.id_pool import IdPool, PlanClock
from blockyard.services.scheduler.kv_cache.kv_cache_manager import CacheStats, KVCacheManager
from blockyard.services.scheduler.kv_cache.prefix_cache import BlockHasher, PrefixMatch
from blockyard.services.scheduler.sequences.requests import Phase, RunningSequence, Sequence
from blockyard.shared.messages import Attach, Attached, Geometry, SlotRun

ATTACH_AGAIN_S = 5.0
CHECK_ALL_S = 0.25

_by_key = attrgetter("key")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int | None  # plans that may be queued besides the running one; None: by the worker's step time
    late: bool = False  # and then they leave no sooner than they have to

    @property
    def num_slots(self) -> int:
        """When plans run ahead a slot rests for a while after its choice: spare ones keep the batch full."""
        return self.max_num_seqs + (-(-self.max_num_seqs // 8) if self.depth != 0 else 0)

    def depth_for(self, step_s: float) -> int:
        """Plans ahead of a worker whose decode steps take so long; 0: it does not say."""
        if self.depth is not None:
            return self.depth
        return min(max(math.ceil(SEND_AHEAD_S / step_s), 1), MAX_PLANS_AHEAD) if step_s > 0 else 1


class WorkerGroup:
    """Everything here dies with the worker or with its attachment."""

    def __init__(
        self, worker: int, geometry: Geometry, limits: BatchLimits, hasher: BlockHasher, stats: CacheStats
    ) -> None:
        self.worker = worker
        self.geometry = geometry
        late = limits.late and limits.depth is None
        self.depth = MAX_PLANS_AHEAD if late else limits.depth_for(geometry.step_s)
        self.pacer = PlanPacer(geometry.step_s, None if late else self.depth)
        self.max_num_seqs = min(limits.max_num_seqs, geometry.max_num_seqs)
        self.max_num_batched_tokens = min(limits.max_num_batched_tokens, geometry.max_num_batched_tokens)
        self.plan_clock = PlanClock()
        self.kv_cache = KVCacheManager(geometry, self.max_num_batched_tokens, self.plan_clock, hasher, stats)
        self.slots = IdPool(limits.num_slots, self.plan_clock)
        self.max_model_len = min(geometry.max_model_len, self.kv_cache.window.max_len(geometry.num_blocks))
        self.last_fair_plan = 0  # the last plan with somebody who went before others
        self.running: list[RunningSequence] = []  # by key: the last is preempted first
        self.decode_batch = DecodeBatch(geometry.block_size)  # some of those, in step
        self.slots_to_end: list[int] = []  # slots to be ended in the next plan
        self.restarts: list[RunningSequence] = []  # whose last token is another than the one their worker drew
        self.in_flight: deque[PlanRecord] = deque()

    @property
    def can_schedule(self) -> bool:
        return len(self.running) < self.max_num_seqs and self.slots.num_free > 0

    def schedule(self, sequence: Sequence, num_blocks: int, found: PrefixMatch) -> RunningSequence:
        """Takes so many blocks beside those found. The caller has looked at free slots and blocks."""
        request = sequence.request
        limit = min(request.num_prompt + request.frame.sampling.max_tokens, self.max_model_len)
        slot = self.slots.take(1)[0]
        running = RunningSequence(
            sequence,
            self.worker,
            self.plan_clock,
            slot,
            sequence.key,
            prefill_end=sequence.num_tokens,
            max_num_tokens=limit,
            # the last token is sampled and never computed; the next one of a hypothesis is chosen here
            max_scheduled_tokens=max(sequence.num_tokens, limit - 1)
            if sequence.hypothesis is None
            else sequence.num_tokens,
            table=self.kv_cache.allocate(sequence, num_blocks, found),
            decode=SlotRun(slot, 1),
            own_tokens=found.num_tokens,
            _computed=found.num_tokens,
        )
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(found.num_tokens, request.num_prompt)
        sequence.last_run = running
        sequence.phase = Phase.RUNNING
        insort(self.running, running, key=_by_key)
        self.decode_batch.add(running)
        return running

    def detach_from_batch(self, running: RunningSequence) -> None:
        """Something happens to it: what comes of plans in flight is looked at by itself, too."""
        for record in self.in_flight:
            record.detached_slots.add(running.slot)
        if self.decode_batch.has(running):
            self.decode_batch.leave(running)

    def free(self, running: RunningSequence) -> None:
        """The seat's choice runs no more: its slot ends with the next plan, its blocks rest."""
        self.running.remove(running)
        self.detach_from_batch(running)
        self.decode_batch.outside.remove(running)
        self.slots_to_end.append(running.slot)
        self.slots.release([running.slot])
        self.kv_cache.free(running)

    def active(self) -> list[RunningSequence]:
        """All sequences that run or have results to come. One may be in the list more than once."""
        return [*self.running, *(running for record in self.in_flight for running in record.all_sequences())]

    def on_sent(self, record: PlanRecord) -> None:
        self.plan_clock.last_sent = record.number
        self.in_flight.append(record)

    def on_answered(self, number: int) -> PlanRecord | None:
        """The record of the oldest plan in flight; None if that is not `number`."""
        if not self.in_flight or self.in_flight[0].number != number:
            return None
        record = self.in_flight.popleft()
        self.plan_clock.last_completed = number
        self.kv_cache.blocks.free_pending()
        self.slots.free_pending()
        return record

    def abandon(self) -> list[Sequence]:
        """What was in flight will never be answered. Returns the choices that ran."""
        self.plan_clock.last_completed = self.plan_clock.last_sent
        return [running.sequence for running in self.running]


class WorkerGroups:
    """Workers this scheduler has attached, and those it has asked."""

    def __init__(self, scheduler: int, limits: BatchLimits, hasher: BlockHasher) -> None:
        self.cache_stats = CacheStats()
        self.attached: dict[int, WorkerGroup] = {}
        self._dirty: dict[int, WorkerGroup] = {}
        self._check_all_at = 0.0
        self._scheduler, self._limits, self._hasher = scheduler, limits, hasher
        self._asked: dict[int, float] = {}

    def knows(self, worker: int) -> bool:
        return worker in self.attached or worker in self._asked

    def attach_request(self, worker: int, now: float, forget: bool = False) -> Attach:
        """`forget`: what its blocks hold counts no more."""
        self._asked[worker] = now
        return Attach(self._scheduler, self._limits.num_slots, self._limits.depth_for(0.0), forget)

    def mark_dirty(self, groups: Iterable[WorkerGroup]) -> None:
        """Something happened to these: a plan may be possible that was not."""
        for group in groups:
            self._dirty[group.worker] = group

    def take_dirty(self, now: float) -> list[WorkerGroup]:
        """WorkerGroups to make plans for, so that of a thousand only those are looked at that have something to do.

        Now and then it is all of them, whatever happened.
        """
        dirty, self._dirty = self._dirty, {}
        if now >= self._check_all_at:
            self._check_all_at = now + CHECK_ALL_S
            return list(self.attached.values())
        return [group for worker, group in dirty.items() if self.attached.get(worker) is group]

    def attach_overdue(self, now: float) -> list[int]:
        """Workers that were asked long ago."""
        return [worker for worker, asked in self._asked.items() if now - asked > ATTACH_AGAIN_S]

    def attach(self, worker: int, frame: Attached) -> WorkerGroup | None:
        """None for an answer to another scheduler, or to an Attach that was answered already."""
        if frame.scheduler != self._scheduler or self._asked.pop(worker, None) is None:
            return None
        group = self.attached[worker] = WorkerGroup(
            worker, frame.geometry, self._limits, self._hasher, self.cache_stats
        )
        return group

    def detach(self, worker: int) -> WorkerGroup | None:
        """Forgets a worker; its group, if it had one, is for the caller to clear."""
        self._asked.pop(worker, None)
        return self.attached.pop(worker, None)
