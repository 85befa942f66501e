"""A scheduler core with everything around it faked, and the invariants that must hold after every step."""

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from blockyard.services.gpu_worker.mock import MockRunner
from blockyard.services.gpu_worker.mock_batch import MockBatch, Pattern
from blockyard.services.gpu_worker.service import Worker
from blockyard.services.scheduler.core import Scheduler, SchedulerSettings
from blockyard.services.scheduler.groups import BatchLimits
from blockyard.services.scheduler.outbox import Outgoing
from blockyard.shared.fake_links import FakeLinks
from blockyard.shared.messages import (
    Attach,
    FinishReason,
    Frame,
    Generate,
    Geometry,
    Member,
    Role,
    Sampling,
    SchedulerIn,
    SlotResult,
    SlotRun,
    StepPlan,
    StepResult,
    TokenBatch,
    TokenStep,
)

from .fakes import FakeDetokenizer, FakeGateway, Journal, ids_list

SCHEDULER = 1
EOS = 7


@dataclass
class InFlight:
    """What a plan may touch until its result is in."""

    number: int
    slots: set[int]
    blocks: set[int]


@dataclass
class FakeWorker:
    """The worker's loop and the mock runner, behind a link that delivers when the test says so."""

    incarnation: int
    links: FakeLinks
    loop: Worker
    inbox: deque[Frame] = field(default_factory=deque)
    tables: dict[int, set[int]] = field(default_factory=dict)  # as of the last plan sent
    flight: list[InFlight] = field(default_factory=list)

    def sent(self, frame: Frame) -> None:
        """Checks a frame against what is in flight as it leaves the scheduler."""
        self.inbox.append(frame)
        if isinstance(frame, Attach):
            self.tables, self.flight = {}, []
            return
        assert isinstance(frame, StepPlan)
        busy_slots = set().union(*(f.slots for f in self.flight))
        busy_blocks = set().union(*(f.blocks for f in self.flight))
        assert frame.runs, "a plan in which nothing runs"
        for slot in frame.ends:
            del self.tables[slot]
        for start in frame.starts:
            assert start.slot not in busy_slots, f"slot {start.slot} starts while a plan in flight runs it"
            assert busy_blocks.isdisjoint(start.blocks), f"slot {start.slot} gets blocks of plans in flight"
            self.tables[start.slot] = set(start.blocks)
        for more in frame.blocks:
            assert busy_blocks.isdisjoint(more.blocks), f"slot {more.slot} gets blocks of plans in flight"
            self.tables[more.slot] |= set(more.blocks)
        slots = {run.slot for run in frame.runs}
        blocks = set().union(*(self.tables[slot] for slot in slots))
        self.flight.append(InFlight(frame.number, slots, blocks))

    def skip(self) -> None:
        """The next plan on the link does not reach the worker's loop, or one of a number that is not due does."""
        plan = StepPlan(SCHEDULER, 10**9, [], [], [], [])
        self.inbox.append(plan)

    def busy(self) -> bool:
        return bool(self.inbox or self.loop.plans)

    def work(self) -> list[Frame]:
        """Takes one frame off the link, or else runs one plan; the answers."""
        if self.inbox:
            self.loop.handle(SCHEDULER, self.inbox.popleft())
        else:
            self.loop.step()
        answers = [frame for _, frame in self.links.answered]
        self.links.answered.clear()
        for answer in answers:
            if isinstance(answer, StepResult):
                assert self.flight.pop(0).number == answer.number
        return answers


class StutteringBatch(MockBatch):
    """Now and then a slot gets nowhere in a step, as with a mask that comes late; it repeats its position later."""

    num_stutters = 0

    def _run(self, run: SlotRun) -> SlotResult | None:
        slot = self.slots.get(run.slot)
        if slot is not None and not slot.finished and (slot.num_computed * 5 + run.slot) % 11 == 10:
            self.num_stutters += 1
            if self.num_stutters % 4:
                return SlotResult(run.slot, [], slot.num_computed) if self.num_stutters % 2 else None
        return super()._run(run)


class StutteringRunner(MockRunner):
    def reset(self, num_slots: int) -> None:
        self._batch = StutteringBatch(self.geometry, num_slots, self._pattern)


@dataclass(frozen=True, kw_only=True)
class Shape:
    depth: int = 1
    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 64
    eos_every: int = 0
    max_queue_len: int = 100
    max_queue_tokens: int = 10_000
    whole_prompts: bool = False
    stutters: bool = False

    @property
    def limit(self) -> int:
        """Tokens of the longest sequence."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


class World:
    def __init__(self, shape: Shape, stops: Callable[[TokenStep], bool] = lambda step: False) -> None:
        self.shape, self.stops = shape, stops
        self.now = 0.0
        self.num_steps = 0
        self.pattern = Pattern(100, 900, shape.eos_every)
        self.core = Scheduler(
            SCHEDULER,
            SchedulerSettings(
                names=["m"],
                root="",
                batch=BatchLimits(shape.max_num_seqs, shape.max_num_batched_tokens, shape.depth),
                max_queue_len=shape.max_queue_len,
                max_queue_tokens=shape.max_queue_tokens,
                whole_prompts=shape.whole_prompts,
            ),
            created=0,
        )
        self.gateways: dict[int, FakeGateway] = {}
        self.workers: dict[int, FakeWorker] = {}
        self.detokenizers: dict[int, FakeDetokenizer] = {}
        self.sent: list[Outgoing] = []  # everything, for scenarios to look at
        self.done: list[Journal] = []  # of gateways that are gone
        self._incarnations = itertools.count(2)

    # --- members

    def add_gateway(self) -> FakeGateway:
        gateway = FakeGateway(next(self._incarnations))
        self.gateways[gateway.incarnation] = gateway
        self._present(gateway.incarnation, Role.API_GATEWAY)
        return gateway

    def add_worker(self) -> FakeWorker:
        incarnation = next(self._incarnations)
        s = self.shape
        geometry = Geometry(
            s.num_blocks, s.block_size, s.max_model_len, 1000, [EOS], s.max_num_seqs, s.max_num_batched_tokens
        )
        links = FakeLinks(Member("gpu_worker", Role.GPU_WORKER, incarnation, "", ready=True))
        runner = StutteringRunner if s.stutters else MockRunner
        worker = FakeWorker(incarnation, links, Worker(links, runner(geometry, self.pattern, 0.0)))
        self.workers[incarnation] = worker
        self._present(incarnation, Role.GPU_WORKER)
        return worker

    def add_detokenizer(self) -> FakeDetokenizer:
        detokenizer = FakeDetokenizer(next(self._incarnations), self.stops)
        self.detokenizers[detokenizer.incarnation] = detokenizer
        self._present(detokenizer.incarnation, Role.DETOKENIZER)
        return detokenizer

    def kill(self, incarnation: int) -> None:
        """The member and all on its links vanish; gateways resubmit what went through a detokenizer."""
        self.workers.pop(incarnation, None)
        self.detokenizers.pop(incarnation, None)
        gateway = self.gateways.pop(incarnation, None)
        if gateway is not None:
            self.done += gateway.journals.values()
            for journal in gateway.journals.values():
                journal.cancelled = True
        self.core.gone(incarnation)
        self.turn()
        for other in self.gateways.values():
            for request_id, journal in other.journals.items():
                if journal.detokenizer == incarnation and journal.open():
                    self.tell(other.incarnation, other.again(request_id))

    def _present(self, incarnation: int, role: Role) -> None:
        self.core.present(Member(role.value, role, incarnation, "", ready=True), self.now)
        self.turn()

    # --- events

    def tell(self, peer: int, frame: SchedulerIn) -> None:
        self.core.handle(peer, frame, self.now)
        self.turn()

    def submit(
        self,
        gateway: FakeGateway,
        request_id: str,
        num_prompt: int,
        n: int = 1,
        deadline_s: float | None = None,
        **sampling: object,
    ) -> Generate:
        sampling.setdefault("max_tokens", 8)
        prompt = [(i * 7 + num_prompt) % 50 for i in range(num_prompt)]
        frame = gateway.new(request_id, prompt, Sampling(**sampling), n, deadline_s=deadline_s)
        self.tell(gateway.incarnation, frame)
        return frame

    def sampling(self, **sampling: object) -> Sampling:
        return Sampling(**sampling)

    def work(self, worker: FakeWorker) -> None:
        for answer in worker.work():
            self.num_steps += isinstance(answer, StepResult)
            self.tell(worker.incarnation, answer)

    def detokenize(self, detokenizer: FakeDetokenizer) -> None:
        for stop in detokenizer.work(self._read):
            self.tell(detokenizer.incarnation, stop)

    def turn(self) -> None:
        for outgoing in self.core.turn(self.now):
            self.sent.append(outgoing)
            to, frame = outgoing.to, outgoing.frame
            if to in self.workers:
                self.workers[to].sent(frame)
            elif to in self.detokenizers:
                assert isinstance(frame, TokenBatch)
                self.detokenizers[to].inbox.append(frame)
            elif to in self.gateways:
                self.gateways[to].take(frame)
        check(self.core)

    def settle(self, max_steps: int = 100_000) -> None:
        """Lets everybody work until there is nothing left to do."""
        for _ in range(max_steps):
            workers = [w for w in self.workers.values() if w.busy()]
            detokenizers = [d for d in self.detokenizers.values() if d.inbox]
            if not workers and not detokenizers:
                return
            for worker in workers:
                self.work(worker)
            for detokenizer in detokenizers:
                self.detokenize(detokenizer)
        raise AssertionError(f"not settled after {max_steps} steps")

    def _read(self, gateway: int, step: TokenStep) -> None:
        if gateway in self.gateways:
            self.gateways[gateway].read(step)

    # --- what must be true in the end

    def check_outputs(self) -> None:
        """Every choice that was not cancelled or refused has one end, and the tokens that belong to it."""
        journals = [j for g in self.gateways.values() for j in g.journals.values()]
        for journal in journals + self.done:
            assert not journal.open(), f"{journal.frame.request_id} never ended"
            check_tokens(journal, self.pattern, self.shape.limit)

    def check_idle(self) -> None:
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert not self.core._lifecycle.requests
        for group in self.core._groups.attached.values():
            assert group.blocks.num_free == group.blocks.num_ids
            assert group.slots.num_free == group.slots.num_ids
        for sink in self.core._streams._sinks.values():
            assert sink.num_streams == 0
        for detokenizer in self.detokenizers.values():
            assert not detokenizer.streams, "a detokenizer's stream was never closed"


def check_tokens(journal: Journal, pattern: Pattern, max_model_len: int) -> None:
    """Ids, log-probabilities and the reason of the end are those that an undisturbed run would have."""
    prompt = ids_list(journal.frame.prompt_ids)
    sampling = journal.frame.sampling
    room = min(sampling.max_tokens, max_model_len - len(prompt))
    for index, out in journal.outputs.items():
        name = f"{journal.frame.request_id}/{index}"
        expected = [pattern.token(sampling, index, len(prompt) + i, prompt, [EOS]) for i in range(len(out.ids))]
        assert out.ids == expected, name
        assert EOS not in out.ids[:-1], f"{name} went on after its end"
        assert len(out.ids) <= max(room, 0), name
        if out.finish is FinishReason.LENGTH:
            assert len(out.ids) == room, name
        elif out.finish is FinishReason.FAILED:
            too_long = len(prompt) + min(1, sampling.max_tokens) > max_model_len
            assert too_long or journal.frame.deadline_s is not None, f"{name}: {out.detail}"
        if sampling.num_logprobs is not None:
            assert [p.token_id for p in out.logprobs] == out.ids, name
        if sampling.num_prompt_logprobs is not None and (out.ids or out.finish is FinishReason.LENGTH):
            found = {p: logprobs.token_id for p, logprobs in out.prompt_logprobs.items()}
            assert found == dict(enumerate(prompt[1:], 1)), name


def check(core: Scheduler) -> None:
    """Invariants of the core's state."""
    for group in core._groups.attached.values():
        assert len(group.running) <= group.max_num_seqs
        assert [s.key for s in group.running] == sorted(s.key for s in group.running)
        assert len(group.flight) <= group.depth + 1
        for pool, used in (
            (group.blocks, [b for seat in group.running for b in seat.blocks]),
            (group.slots, [seat.slot for seat in group.running]),
        ):
            resting = [i for _, ids in pool._resting for i in ids]
            assert len(resting) == pool.num_resting
            assert sorted(pool._free + resting + used) == list(range(pool.num_ids)), "an id is lost or has two owners"
        for seat in group.running:
            request = seat.choice.request
            last = request.num_prompt + request.frame.sampling.max_tokens - 1  # is sampled, never computed
            assert seat.granted <= max(seat.prefill_end, min(last, group.max_model_len - 1))
            assert seat.granted <= seat.capacity == len(seat.blocks) * group.blocks.block_size
            assert seat.granted - (seat.choice.known - 1) <= group.depth + 1 or seat.granted <= seat.prefill_end
    waiting = [c for r in core._lifecycle.requests.values() for c in r.choices.values() if c.ticket]
    assert len(waiting) == len(core._waiting)
    assert sum(c.known for c in waiting) == core._waiting._num_tokens
    live = core._streams._sinks.values()
    assert all(r.sink is None or r.sink in live for r in core._lifecycle.requests.values())
    for sink in live:
        bound = sum(len(r.choices) for r in core._lifecycle.requests.values() if r.sink is sink)
        assert sink.num_streams == bound
