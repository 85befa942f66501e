"""Worker groups: for each its running sequences, KV cache, slots and unanswered plans; and which ones are attached."""

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as ReadOnly
from dataclasses import dataclass, replace
from operator import attrgetter

from blockyard.services.scheduler.adapters.group_adapters import GroupAdapters
from blockyard.services.scheduler.adapters.group_prompts import GroupPrompts
from blockyard.services.scheduler.batch.decode_batch import DecodeBatch
from blockyard.services.scheduler.batch.pipeline_turns import PipelineTurns
from blockyard.services.scheduler.batch.plan_builder import PackedRun, PlanRecord
from blockyard.services.scheduler.kv_cache.id_pool import IdPool
from blockyard.services.scheduler.kv_cache.kv_cache_manager import CacheStats, KVCacheManager
from blockyard.services.scheduler.kv_cache.prefix_cache import BlockHasher, PrefixMatch
from blockyard.services.scheduler.kv_cache.sliding_window import max_len
from blockyard.services.scheduler.plan_pacer import MAX_PLANS_AHEAD, SEND_AHEAD_S, PlanClock, PlanPacer, WakeupTimers
from blockyard.services.scheduler.sequences.requests import Request, RunningSequence, Sequence
from blockyard.shared.messages import Attach, Attached, Geometry, SlotRun

ATTACH_AGAIN_S = 5.0  # without an answer
CHECK_ALL_S = 0.25  # between checks of all groups, changed or not

_by_key = attrgetter("key")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int | None  # plans ahead of the running one; None: by the worker's step time
    late: bool = False  # with `depth` None: plans are sent no earlier than needed
    watermark: float | None = None  # fraction of KV blocks that a sequence leaves free when it starts; None: 0.01

    @property
    def num_slots(self) -> int:
        """With plans ahead, a freed slot stays pending for a while: spare slots keep the batch full."""
        return self.max_num_seqs + (-(-self.max_num_seqs // 8) if self.depth != 0 else 0)

    def depth_for(self, step_s: float) -> int:
        """Plans ahead of a worker with decode steps of `step_s`, which is 0 if unknown."""
        if self.depth is not None:
            return self.depth
        return min(max(math.ceil(SEND_AHEAD_S / step_s), 1), MAX_PLANS_AHEAD) if step_s > 0 else 1


class WorkerGroup:
    """One attached worker. It is dropped with all its state when the worker is lost or attached again."""

    def __init__(
        self, worker: int, geometry: Geometry, limits: BatchLimits, hasher: BlockHasher, stats: CacheStats
    ) -> None:
        self.worker = worker
        self.geometry = geometry
        late = limits.late and limits.depth is None
        self.depth = MAX_PLANS_AHEAD if late else limits.depth_for(geometry.step_s)
        if geometry.num_stages > 1 and limits.depth != 0:
            self.depth, late = geometry.num_stages - 1 + limits.depth_for(geometry.step_s), False  # of each stage one
        self.pacer = PlanPacer(geometry.step_s, None if late else self.depth)
        self.has_kv = geometry.pooling is None or geometry.pooling.has_kv  # else a step takes whole texts
        self.max_num_seqs = min(limits.max_num_seqs, geometry.max_num_seqs)
        self.max_num_batched_tokens = min(limits.max_num_batched_tokens, geometry.max_num_batched_tokens)
        if not self.has_kv:
            self.max_num_batched_tokens = geometry.max_num_batched_tokens  # which holds the longest text
            hasher = hasher.disabled()
        self.plan_clock = PlanClock()
        self.kv_cache = KVCacheManager(
            geometry, self.max_num_batched_tokens, self.plan_clock, hasher, stats, limits.watermark
        )
        num_slots = replace(limits, max_num_seqs=self.max_num_seqs).num_slots
        self._num_spare_slots = num_slots - self.max_num_seqs
        self.slots = IdPool(num_slots, self.plan_clock)
        self.max_model_len = longest_sequence(geometry)
        self.adapters = GroupAdapters(geometry, self.plan_clock)
        self.prompts = GroupPrompts(geometry.num_prompt_adapters)
        self.last_fair_plan = 0  # the last plan with a prefill that excluded others
        self._running: list[RunningSequence] = []
        self.running: ReadOnly[RunningSequence] = self._running  # by key; the last one is preempted first
        outside = list[RunningSequence]()
        self._decode_batch = DecodeBatch(geometry.block_size, outside)
        self.turns: PipelineTurns | None = None  # None: there is one stage
        if geometry.num_stages > 1:
            batches = [DecodeBatch(geometry.block_size, outside) for _ in range(geometry.num_stages)]
            self.turns = PipelineTurns(batches, max(self.depth - geometry.num_stages + 1, 0))
        self._slots_to_end: list[int] = []  # the next plan ends them
        self._restarts: list[RunningSequence] = []
        self.restarts: ReadOnly[RunningSequence] = self._restarts  # their last token is not what the worker sampled
        self._in_flight: deque[PlanRecord] = deque()
        self.in_flight: ReadOnly[PlanRecord] = self._in_flight

    @property
    def decode_batch(self) -> DecodeBatch:
        """Running sequences that decode a token in every plan, or in every plan of the current turn."""
        return self._decode_batch if self.turns is None else self.turns.batch

    @property
    def num_running(self) -> int:
        """Sequences in the batch, and texts of packed steps."""
        return len(self.running) + sum(record.packed_amount.sequences for record in self.in_flight)

    @property
    def can_schedule(self) -> bool:
        return len(self.running) < self.max_num_seqs and self.slots.num_free > 0

    @property
    def can_schedule_batch_line(self) -> bool:
        """Spare slots are for online sequences: one that preempts a batch line needs its own slot at once."""
        return self.can_schedule and self.slots.num_free > self._num_spare_slots

    def holds(self, request: Request) -> bool:
        """Whether sequences of a request may start here now, as far as its adapters are concerned."""
        return (request.adapter is None or self.adapters.can_start(request.adapter)) and (
            request.prompt_adapter is None or self.prompts.can_start(request.prompt_adapter)
        )

    def can_start(self, adapter: int) -> bool:
        """Whether sequences with an adapter, of either kind, may start here now."""
        return self.adapters.can_start(adapter) or self.prompts.can_start(adapter)

    def is_loading(self, adapter: int) -> bool:
        """Whether the worker will have an adapter, of either kind, soon."""
        return self.adapters.is_loading(adapter) or self.prompts.is_loading(adapter)

    def schedule(self, sequence: Sequence, num_blocks: int, found: PrefixMatch) -> RunningSequence:
        """Starts a sequence with the blocks found and `num_blocks` more. The caller has checked that they are free."""
        request = sequence.request
        limit = min(request.num_prompt + request.frame.sampling.max_tokens, self.max_model_len)
        slot, adapter = self.slots.take(1)[0], request.adapter
        running = RunningSequence(
            sequence,
            self.worker,
            self.plan_clock,
            slot,
            sequence.key,
            prefill_end=sequence.num_tokens,
            max_num_tokens=limit,
            # the last token is never computed; a hypothesis waits for the scheduler's choice of its next token
            max_scheduled_tokens=max(sequence.num_tokens, limit - 1)
            if sequence.hypothesis is None
            else sequence.num_tokens,
            table=self.kv_cache.allocate(sequence, num_blocks, found),
            decode=SlotRun(slot, 1),
            own_tokens=found.num_tokens,
            num_prefilled=found.num_tokens,
            adapter_place=None if adapter is None else self.adapters.start(adapter),
        )
        sequence.on_running(running, found.num_tokens)
        insort(self._running, running, key=_by_key)
        insort(self.decode_batch.outside, running, key=_by_key)
        return running

    def detach_from_batch(self, running: RunningSequence) -> None:
        """Takes a sequence out of the decode batch. Its results of plans in flight are handled one by one, too."""
        for record in self.in_flight:
            record.detach(running.slot)
        batch = self.decode_batch if self.turns is None else self.turns.batch_of(running)
        if batch is not None and batch.has(running):
            batch.leave(running)

    def free(self, running: RunningSequence) -> None:
        """Stops a sequence: the next plan ends its slot, and its blocks are pending until plans in flight are done."""
        self._running.remove(running)
        self.detach_from_batch(running)
        self.decode_batch.outside.remove(running)
        if self.turns is not None:
            self.turns.remove(running)
        self._slots_to_end.append(running.slot)
        self.slots.release([running.slot])
        if running.adapter_place is not None:
            self.adapters.end(running.adapter_place)
        self.kv_cache.free(running)

    def active(self) -> list[RunningSequence]:
        """All sequences that run or have results to come. One may be in the list more than once."""
        return [*self.running, *(running for record in self.in_flight for running in record.all_sequences())]

    def packed_in_flight(self) -> list[PackedRun]:
        """The texts of packed steps without results yet."""
        return [run for record in self.in_flight for run in record.packed]

    def in_flight_sequences(self) -> list[Sequence]:
        """All sequences with results to come. One may be in the list more than once."""
        slots = (running.sequence for record in self.in_flight for running in record.all_sequences())
        return [*slots, *(run.sequence for run in self.packed_in_flight())]

    def on_sent(self, record: PlanRecord) -> list[int]:
        """A plan is sent. Returns the slots that it ends."""
        self.plan_clock.on_sent(record.number)
        self._in_flight.append(record)
        if self.turns is not None:
            self.turns.on_sent(record.number)
        ends, self._slots_to_end = self._slots_to_end, []
        return ends

    def on_answered(self, number: int) -> PlanRecord | None:
        """Takes the record of plan `number`; None if that is not the oldest plan in flight."""
        if not self.in_flight or self.in_flight[0].number != number:
            return None
        record = self._in_flight.popleft()
        self.plan_clock.on_completed(number)
        if self.turns is not None:
            self.turns.on_answered(number)
        if self.kv_cache.blocks.has_pending:
            self.kv_cache.blocks.free_pending()
        if self.slots.num_pending:
            self.slots.free_pending()
        return record

    def restart_sequence(self, running: RunningSequence) -> None:
        """The next plan starts a sequence again in its slot."""
        self._restarts.append(running)

    def end_restarted(self) -> list[RunningSequence]:
        """Returns the sequences to start again. The next plan ends their slots first. Preempted ones are left out."""
        restarted = [running for running in self.restarts if running in self.running]
        self._slots_to_end += [running.slot for running in restarted]
        self._restarts.clear()
        return restarted

    def abandon(self) -> list[Sequence]:
        """Plans in flight will never be answered. Returns the sequences that ran."""
        self.plan_clock.on_completed(self.plan_clock.last_sent)
        return [running.sequence for running in self.running]


def longest_sequence(geometry: Geometry) -> int:
    """Tokens of the longest sequence of a worker: its model's length, and what its blocks hold, if it has any."""
    if geometry.pooling is not None and not geometry.pooling.has_kv:
        return geometry.max_model_len
    return min(geometry.max_model_len, max_len(geometry.window, geometry.block_size, geometry.num_blocks))


@dataclass(slots=True)
class AskedWorker:
    """A worker that was sent an Attach and has not answered it."""

    frame: Attach
    at: float  # when it was sent last
    num_resets: int  # of all prefix caches, before it was sent first


class WorkerGroups:
    """All workers that this scheduler has attached or asked to attach."""

    def __init__(self, scheduler: int, limits: BatchLimits, hasher: BlockHasher) -> None:
        self.cache_stats = CacheStats()
        self._attached: dict[int, WorkerGroup] = {}
        self.attached: Mapping[int, WorkerGroup] = self._attached  # by the worker's incarnation
        self.asked: dict[int, AskedWorker] = {}  # workers that have not answered an Attach
        self._num_asked: Counter[int] = Counter()  # by worker
        self._num_resets = 0  # of all prefix caches
        self._num_carried_out: Counter[int] = Counter()  # of these resets, by worker
        self.timers = WakeupTimers()
        self.scheduler = scheduler  # incarnation
        self._dirty: dict[int, WorkerGroup] = {}
        self._check_all_at = 0.0
        self._limits, self._hasher = limits, hasher

    def knows(self, worker: int) -> bool:
        return worker in self.attached or worker in self.asked

    def on_reset(self) -> None:
        """The blocks that any worker has cached until now are not to be used, also if it is not attached."""
        self._num_resets += 1
        for asked in self.asked.values():
            if asked.frame.forget:  # it has cached nothing since
                asked.num_resets = self._num_resets

    def attach_request(self, worker: int, now: float) -> Attach:
        """The frame to send to a worker. It drops its cached blocks, if a reset was not carried out there."""
        number = self._num_asked[worker]
        self._num_asked[worker] += 1
        forget = self._num_carried_out[worker] < self._num_resets
        frame = Attach(self.scheduler, self._limits.num_slots, forget, number)
        self.asked[worker] = AskedWorker(frame, now, self._num_resets)
        return frame

    def mark_dirty(self, groups: Iterable[WorkerGroup]) -> None:
        """Something changed for these groups: a plan may be possible now."""
        for group in groups:
            self._dirty[group.worker] = group

    def mark_all_dirty(self) -> None:
        self._dirty.update(self.attached)

    def take_dirty(self, now: float) -> list[WorkerGroup]:
        """Groups to build plans for: changed ones, ones with a timer that is due, and every CHECK_ALL_S all of them."""
        if self.timers.heap and self.timers.heap[0][0] <= now:
            self.mark_dirty(self.attached[worker] for worker in self.timers.take_due(now) if worker in self.attached)
        dirty, self._dirty = self._dirty, {}
        if now >= self._check_all_at:
            self._check_all_at = now + CHECK_ALL_S
            return list(self.attached.values())
        return [group for worker, group in dirty.items() if self.attached.get(worker) is group]

    def attach_overdue(self, now: float) -> list[tuple[int, Attach]]:
        """Frames to repeat, to workers that have not answered for ATTACH_AGAIN_S."""
        overdue = [(worker, asked) for worker, asked in self.asked.items() if now - asked.at > ATTACH_AGAIN_S]
        for _, asked in overdue:
            asked.at = now
        return [(worker, asked.frame) for worker, asked in overdue]

    def attach(self, worker: int, frame: Attached) -> WorkerGroup | None:
        """A new group; None for an answer to another scheduler, or to an Attach that is not the last one.

        An earlier Attach may have been answered with cached blocks that the last one makes the worker forget.
        """
        asked = self.asked.get(worker)
        if frame.scheduler != self.scheduler or asked is None or asked.frame.number != frame.number:
            return None
        del self.asked[worker]
        self._num_carried_out[worker] = asked.num_resets
        group = self._attached[worker] = WorkerGroup(
            worker, frame.geometry, self._limits, self._hasher, self.cache_stats
        )
        return group

    def detach(self, worker: int) -> WorkerGroup | None:
        """Drops a worker. The caller requeues the sequences of the group that is returned."""
        self.asked.pop(worker, None)
        return self._attached.pop(worker, None)
