"""A worker on a link that delivers on the test's demand; frames for it are checked against the plans in flight."""

from collections import deque
from dataclasses import dataclass, field

import msgspec
from fake_links import FakeLinks

from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.services.gpu_worker.mock.batch import MockBatch, MockSlot, Pattern
from blockyard.services.gpu_worker.mock.kv import MockKV
from blockyard.services.gpu_worker.mock.runner import MockRunner
from blockyard.services.gpu_worker.service import Worker
from blockyard.shared.messages import (
    NO_LOGPROBS,
    NO_TOKEN,
    Attach,
    Attached,
    BlockFetch,
    DropAdapter,
    Frame,
    Geometry,
    KVAbort,
    KVAudit,
    KVOpenTransfers,
    KVReceive,
    KVSend,
    LoadAdapter,
    MemoryTag,
    Sleep,
    SlotResult,
    SlotRun,
    StepPlan,
    StepResult,
    Wake,
    decode_logprobs,
)

from .fake_transfers import FakeTransfers, abort
from .fakes import ids_bytes, ids_list

SCHEDULER = 1


@dataclass
class InFlight:
    """Slots and blocks that a plan may read or write until its result arrives."""

    number: int
    runs: list[int]  # slots, in the plan's order
    blocks: set[int]
    host: set[int]
    sends: list[KVSend]
    named: set[int]  # blocks whose hashes the worker adds with the plan
    places: set[int] = field(default_factory=set)  # of adapters
    counts: dict[int, int] = field(default_factory=dict)  # tokens of each slot, at most


@dataclass
class Table:
    since: int  # number of the plan
    num_computed: int  # tokens, as of the last result
    blocks: list[int]
    adapter_place: int | None = None
    num_known: int = 0  # tokens, as of the last result

    def seen(self, geometry: Geometry) -> set[int]:
        """Blocks that the slot may still read or write."""
        first = 0 if geometry.window is None else max(0, self.num_computed - geometry.window + 1)
        return set(self.blocks[first // geometry.block_size :])


@dataclass
class FakeWorker:
    """The worker's loop and the mock runner, behind a link that delivers on the test's demand."""

    incarnation: int
    links: FakeLinks
    loop: Worker
    runner: SleepingRunner
    mock: MockRunner  # in `runner`
    transfers: dict[int, FakeTransfers] = field(default_factory=dict)  # of all workers
    inbox: deque[Frame] = field(default_factory=deque)
    tables: dict[int, "Table"] = field(default_factory=dict)  # as of the last plan sent
    in_flight: list[InFlight] = field(default_factory=list)
    woken: set[MemoryTag] = field(default_factory=set)  # while asleep
    places: dict[int, int] = field(default_factory=dict)  # the adapter in each place, as of the last plan sent

    def sent(self, frame: Frame) -> None:
        """Checks a frame that leaves the scheduler against the plans in flight."""
        busy_transfers = self.busy_transfers()
        self.inbox.append(frame)
        if isinstance(frame, KVAbort | KVAudit | LoadAdapter | DropAdapter):
            return
        if isinstance(frame, KVReceive):
            assert busy_transfers.isdisjoint(frame.blocks), "blocks of a transfer are reserved for another"
            used = set().union(*(f.blocks for f in self.in_flight))
            used = used.union(*(f.named for f in self.in_flight))
            assert used.isdisjoint(frame.blocks), "blocks of plans in flight are reserved"
            return
        if isinstance(frame, Attach | Sleep | Wake):
            self.tables, self.in_flight, self.places = {}, [], {}
            self.woken = self.woken | {*frame.tags} if isinstance(frame, Wake) else set()
            return
        assert isinstance(frame, StepPlan)
        busy_slots = set().union(*(f.runs for f in self.in_flight))
        busy_blocks = set().union(*(f.blocks for f in self.in_flight))
        busy_host = set().union(*(f.host for f in self.in_flight))
        assert frame.runs or frame.packed, "a plan in which nothing runs"
        for slot in frame.ends:
            del self.tables[slot]
        for save in frame.saves:
            assert save.block not in busy_blocks, f"block {save.block} is given up while a plan in flight has it"
            assert save.host not in busy_host, f"host block {save.host} is overwritten while a plan in flight copies it"
            busy_host.add(save.host)
        for fetch in frame.fetches:
            assert fetch.block not in busy_blocks, f"block {fetch.block} is written while a plan in flight has it"
        busy_places = set().union(*(f.places for f in self.in_flight))
        for one in frame.adapters:
            assert one.place not in busy_places, f"place {one.place} is overwritten while a plan in flight reads it"
            assert all(table.adapter_place != one.place for table in self.tables.values()), "a slot has this place"
            self.places[one.place] = one.adapter
        for start in frame.starts:
            assert start.slot not in busy_slots, f"slot {start.slot} starts while a plan in flight runs it"
            fresh = start.blocks[start.num_computed // self.runner.geometry.block_size :]
            assert busy_blocks.isdisjoint(fresh), f"slot {start.slot} gets blocks of plans in flight"
            assert busy_transfers.isdisjoint(fresh), f"slot {start.slot} gets blocks of transfers"
            num_known = len(ids_list(start.token_ids))
            self.tables[start.slot] = Table(
                frame.number, start.num_computed, list(start.blocks), start.adapter_place, num_known
            )
        for more in frame.blocks:
            assert busy_blocks.isdisjoint(more.blocks), f"slot {more.slot} gets blocks of plans in flight"
            assert busy_transfers.isdisjoint(more.blocks), f"slot {more.slot} gets blocks of transfers"
            self.tables[more.slot].blocks += more.blocks
        slots = [run.slot for run in frame.runs]
        geometry = self.runner.geometry
        blocks = set().union(*(self.tables[slot].seen(geometry) for slot in slots))
        blocks |= {copy.src for copy in frame.copies}
        host = {copy.host for copy in [*frame.saves, *frame.fetches]}
        named = {full.block for full in frame.full_blocks}
        places = {place for slot in slots if (place := self.tables[slot].adapter_place) is not None}
        counts = {run.slot: run.max_tokens for run in frame.runs}
        self.in_flight.append(InFlight(frame.number, slots, blocks, host, frame.sends, named, places, counts))

    def busy_transfers(self) -> set[int]:
        """Blocks that transfers may touch, those included that the worker is about to hear of."""
        own = self.transfers[self.incarnation]
        coming = {b for f in self.inbox if isinstance(f, KVReceive) and f.transfer not in own.over for b in f.blocks}
        sent = {b for plan in self.in_flight for s in plan.sends if s.transfer not in own.over for b in s.blocks}
        return own.blocks | coming | sent

    def skip(self) -> None:
        """Sends the worker's loop a plan with a number that is not the next one."""
        plan = StepPlan(SCHEDULER, 10**9, [], [], [], [])
        self.inbox.append(plan)

    def busy(self) -> bool:
        return bool(self.inbox or self.loop.session.plans)

    def work(self) -> list[Frame]:
        """Takes one frame off the link, or else runs one plan. Returns the answers."""
        own = self.transfers[self.incarnation]
        if self.inbox:
            self._take(self.inbox.popleft())
        else:
            self.loop.step()
        answers: list[Frame] = []
        for _, frame in self.links.answered:
            answer = frame
            if isinstance(answer, StepResult):
                record = self.in_flight.pop(0)
                assert record.number == answer.number
                for send in record.sends:
                    own.send(send)
                for slot in answer.slots:
                    if (table := self._table(slot.slot, answer)) is not None:
                        table.num_computed = slot.num_computed
                        table.num_known += len(slot.token_ids)
                for slot, token in zip(record.runs, ids_list(answer.token_ids), strict=bool(answer.token_ids)):
                    if token != NO_TOKEN and (table := self._table(slot, answer)) is not None:
                        table.num_computed += 1
                        table.num_known += 1
                answer = self._in_words(answer, record.runs) if answer.number % 5 == 4 else answer
            if isinstance(answer, Attached):
                still_open = own.open_transfers()
                numbers, blocks = list(still_open), list(still_open.values())
                answer = msgspec.structs.replace(answer, open_transfers=numbers, open_transfer_blocks=blocks)
            answers.append(answer)
        self.links.answered.clear()
        return answers

    def _take(self, frame: Frame) -> None:
        own = self.transfers[self.incarnation]
        if isinstance(frame, Sleep):
            for number in own.open_transfers():
                abort(self.transfers, self.incarnation, KVAbort(number))
        if isinstance(frame, KVReceive):
            own.receive(frame, self.runner.block_hashes)
        elif isinstance(frame, KVAudit):
            still_open = own.open_transfers()
            numbers, blocks = list(still_open), list(still_open.values())
            own.notices.append(KVOpenTransfers(frame.number, numbers, blocks))
        elif isinstance(frame, KVAbort):
            abort(self.transfers, self.incarnation, frame)
        else:
            self.loop.session.handle(SCHEDULER, frame)
            self.loop.session.is_loading_adapters()

    def _in_words(self, answer: StepResult, runs: list[int]) -> StepResult:
        """The same answer with a SlotResult in place of each plain token, if its slot is still known."""
        slots, token_ids = list(answer.slots), ids_list(answer.token_ids)
        logprobs = answer.logprobs or [NO_LOGPROBS] * len(token_ids)
        for i, token in enumerate(token_ids):
            if token != NO_TOKEN and (table := self._table(runs[i], answer)) is not None:
                scores = decode_logprobs(logprobs[i])
                slots.append(SlotResult(runs[i], [token], table.num_computed, logprobs=[scores] if scores else []))
                token_ids[i], logprobs[i] = NO_TOKEN, NO_LOGPROBS
        left = ids_bytes(token_ids) if {*token_ids} - {NO_TOKEN} else b""
        return msgspec.structs.replace(answer, slots=slots, token_ids=left, logprobs=logprobs if left else [])

    def _table(self, slot: int, answer: StepResult) -> Table | None:
        """The table of the slot that ran, or None if the slot was ended or reused."""
        table = self.tables.get(slot)
        return table if table is not None and table.since <= answer.number else None


@dataclass
class WaitingBatch(MockBatch):
    """Sometimes a slot gets no token, and repeats its last position later.

    The KV of all its scheduled tokens is written anyway, so that other slots may read it.
    """

    has_late_masks: bool = False  # any slot may wait, for a few steps in a row
    host_waits: int = 0  # sequences that their host samples get a token, and none in so many steps after it
    num_late: int = 0
    waited: dict[int, tuple[int, int]] = field(default_factory=dict)  # by slot: tokens known, steps waited there
    waiting: set[int] = field(default_factory=set)  # slots that waited in the last step

    def step(self, plan: StepPlan) -> list[SlotResult]:
        self.waiting.clear()
        return super().step(plan)

    def run_slot(self, run: SlotRun) -> SlotResult | None:
        slot = self.slots.get(run.slot)
        if slot is None or slot.finished or not self._waits(run, slot):
            return super().run_slot(run)
        self.waiting.add(run.slot)
        begin, end = slot.num_computed, slot.num_tokens
        self.kv.write(slot.blocks, begin, end, slot.tokens)
        slot.compute(run.max_tokens)
        first, prompt_logprobs = self._prompt_logprobs(slot, begin)
        slot.num_computed = end - 1
        self._release_passed(run.slot, slot)
        if begin == end - 1 and self.num_late % 2 and not prompt_logprobs:
            return None
        return SlotResult(run.slot, [], end - 1, first_prompt=first, prompt_logprobs=prompt_logprobs)

    def _waits(self, run: SlotRun, slot: MockSlot) -> bool:
        if slot.num_computed + run.max_tokens < slot.num_tokens:
            return False
        if self.has_late_masks and (slot.num_computed * 5 + run.slot) % 11 == 10:
            self.num_late += 1
            if self.num_late % 4:
                return True
        if not self.host_waits or slot.sampling.seed % 3 or slot.num_tokens == len(slot.prompt):
            return False
        known, steps = self.waited.get(run.slot, (0, 0))
        steps = steps + 1 if known == slot.num_tokens else 1
        self.waited[run.slot] = (slot.num_tokens, steps)
        return steps <= self.host_waits


class WaitingRunner(MockRunner):
    """See `WaitingBatch`."""

    def __init__(self, geometry: Geometry, pattern: Pattern, has_late_masks: bool, host_waits: int) -> None:
        self._waits = has_late_masks, host_waits
        super().__init__(geometry, pattern, 0.0)

    @property
    def waiting_slots(self) -> set[int]:
        return self._batch.waiting if isinstance(self._batch, WaitingBatch) else set()

    def reset(self, num_slots: int) -> None:
        has_late_masks, host_waits = self._waits
        self._batch = WaitingBatch(
            self.geometry,
            num_slots,
            self._pattern,
            self.block_hashes,
            has_late_masks=has_late_masks,
            host_waits=host_waits,
        )


class FailingKV(MockKV):
    """Every fourth fetch from host memory fails."""

    num_fetches = 0

    def fetch(self, fetch: BlockFetch) -> bool:
        self.num_fetches += 1
        return super().fetch(fetch) and self.num_fetches % 4 != 0
