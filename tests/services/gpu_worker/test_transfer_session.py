"""KV transfers in session and loop: frames, completed plans, attaches, sleep. The transfers are fake."""

import threading
from dataclasses import dataclass, field

import msgspec
import pytest
from fake_links import FakeLinks

from blockyard.services.gpu_worker import service
from blockyard.services.gpu_worker.interfaces import CompletedPlan
from blockyard.services.gpu_worker.service import CHORE_POLL_S, IDLE_POLL_S, LANDED_POLL_S, TRANSFER_POLL_S, Worker
from blockyard.shared.bus.member_list import Event, Gone
from blockyard.shared.messages import (
    Attach,
    Attached,
    Fenced,
    Geometry,
    KVAbort,
    KVAudit,
    KVLanded,
    KVOpenTransfers,
    KVReceive,
    KVRole,
    KVSend,
    KVSendEnded,
    Member,
    OutOfStep,
    Role,
    Sleep,
    Slept,
    SlotResult,
    SlotRun,
    Stats,
    StepPlan,
    StepResult,
    WorkerIn,
)

ME, OLD, NEW, OTHER = 7, 100, 200, 300
RECEIVE = KVReceive(1, OTHER, 1, [3, 4])
GEOMETRY = Geometry(8, 16, 64, 100, [1], 4, 32)


class Names:
    def blocks_and_hashes(self) -> tuple[list[int], bytes]:
        return [], b""

    host_blocks_and_hashes = blocks_and_hashes


class Runner:
    adapters = None
    """Completes a plan when it is collected."""

    def __init__(self, log: list[object]) -> None:
        self.geometry, self.block_hashes, self.level, self.log = GEOMETRY, Names(), 0, log
        self.flight: list[StepPlan] = []

    @property
    def in_flight(self) -> int:
        return len(self.flight)

    def count(self, stats: Stats) -> Stats:
        return stats

    def can_launch(self) -> bool:
        return True

    def reset(self, num_slots: int) -> None:
        self.flight.clear()
        self.log.append("reset")

    def join_step(self) -> bool:
        return False

    def idle(self) -> bool:
        self.log.append("chore")
        return False

    def sleep(self, level: int) -> int:
        self.log.append("sleep")
        return 0

    def launch(self, plan: StepPlan) -> None:
        self.flight.append(plan)

    def sample_rows(self) -> None:
        pass

    def collect(self) -> list[CompletedPlan]:
        done, self.flight = self.flight, []
        return [CompletedPlan(p, [SlotResult(r.slot, [5], 1) for r in p.runs], 1.0, 0.001, []) for p in done]


@dataclass
class Transfers:
    log: list[object]
    busy: bool = False
    needs_polling: bool = False
    num_open: int = 0
    answers: list[KVLanded | KVSendEnded] = field(default_factory=list)

    def open(self) -> None:
        self.log.append("open")

    def close(self) -> None:
        self.log.append("close")

    def describe(self, geometry: Geometry) -> Geometry:
        return msgspec.structs.replace(geometry, kv_role=KVRole.DECODE)

    def open_transfers(self) -> dict[int, list[int]]:
        return {9: [1, 2], 8: [3]}

    def receive(self, frame: KVReceive) -> None:
        self.log.append(frame)

    def abort(self, frame: KVAbort) -> None:
        self.log.append(frame)

    def on_plan_done(self, plan: StepPlan) -> None:
        self.log.append(("sends", plan.number))
        self.answers.append(KVSendEnded(5, True))

    def count(self, stats: Stats) -> Stats:
        return msgspec.structs.replace(stats, sends_to=[OTHER])

    def on_gone(self, worker: int) -> None:
        self.log.append(("gone", worker))

    def poll(self) -> list[KVLanded | KVSendEnded]:
        answers, self.answers = self.answers, []
        return answers


def worker(runner: Runner | None = None) -> tuple[Worker, FakeLinks, Transfers, list[object]]:
    runner = runner or Runner([])
    links, log = FakeLinks(Member("worker", Role.GPU_WORKER, ME, "ipc://w")), runner.log
    transfers = Transfers(log)
    it = Worker(links, runner, transfers)
    it.session.handle(OLD, Attach(OLD, 9))
    log.clear()
    return it, links, transfers, log


def plan(number: int, *sends: KVSend, scheduler: int = OLD) -> StepPlan:
    return StepPlan(scheduler, number, [], [], [], [SlotRun(2, 1)], sends=list(sends))


SEND = KVSend(5, OTHER, 1, b"ipc://o", [1], [2], True)


def test_attached_has_the_memory_and_the_open_transfers() -> None:
    it, links, _, log = worker()
    it.session.handle(NEW, Attach(NEW, 9))
    assert log == ["reset", "open"], "the runner is awake before its memory is used"
    attached = links.answered[-1][1]
    assert isinstance(attached, Attached) and attached.geometry.kv_role is KVRole.DECODE
    assert (attached.open_transfers, attached.open_transfer_blocks) == ([9, 8], [[1, 2], [3]])


def test_the_counters_have_those_of_transfers() -> None:
    runner = Runner([])
    it, links, _, _ = worker(runner)
    it.counters.publish()
    assert links.me.stats.sends_to == [OTHER] and links.me.stats.blocks_total == runner.geometry.num_blocks


def test_frames_of_the_attached_scheduler_reach_the_transfers() -> None:
    it, _, _, log = worker()
    it.session.handle(OLD, RECEIVE)
    it.session.handle(OLD, KVAbort(1))
    assert log == [RECEIVE, KVAbort(1)]


def test_a_question_is_answered_after_all_that_was_to_be_said_before() -> None:
    it, links, transfers, _ = worker()
    transfers.answers.append(KVLanded(7, [1], [], True))
    it.session.handle(OLD, KVAudit(3))
    assert links.answered[-2:] == [
        (OLD, KVLanded(7, [1], [], True)),
        (OLD, KVOpenTransfers(3, [9, 8], [[1, 2], [3]])),
    ]
    it.session.handle(NEW, KVAudit(3))
    assert links.answered[-1] == (NEW, Fenced())


def test_frames_of_another_scheduler_are_refused() -> None:
    it, links, _, log = worker()
    it.session.handle(NEW, RECEIVE)
    it.session.handle(NEW, KVAbort(1))
    assert log == [] and links.answered[-2:] == [(NEW, Fenced())] * 2


def test_out_of_step_only_aborts_are_served() -> None:
    """A KVReceive was sent before the scheduler knew: its blocks may be given out again by now."""
    it, links, _, log = worker()
    it.session.handle(OLD, plan(3))
    assert links.answered[-1] == (OLD, OutOfStep(1))
    log.clear()
    it.session.handle(OLD, RECEIVE)
    it.session.handle(OLD, KVAbort(2))
    assert log == [KVAbort(2)]


def test_sends_start_when_their_step_is_complete_and_after_its_result() -> None:
    it, links, _, log = worker()
    it.session.handle(OLD, plan(1, SEND))
    it.session.handle(OLD, plan(2))
    assert log == []
    it.step()
    it.step()
    assert log == [("sends", 1)]
    kinds = [type(frame) for _, frame in links.answered[1:]]
    assert kinds == [StepResult, KVSendEnded, StepResult]


def test_sends_of_plans_that_no_scheduler_waits_for_are_ignored() -> None:
    runner = Runner([])
    it, _, _, log = worker(runner)
    it.session.handle(OLD, plan(1, SEND))
    runner.launch(it.session.plans.popleft())
    it.session.handle(OLD, Gone(Member("scheduler", Role.SCHEDULER, OLD, "ipc://s")))
    it.step()
    assert log == []


def test_answers_go_to_the_scheduler_that_is_attached_now() -> None:
    it, links, _, _ = worker()
    ended = KVLanded(3, [], [], True)
    it.session.handle(OLD, Gone(Member("scheduler", Role.SCHEDULER, OLD, "ipc://s")))
    it.session.handle(NEW, Attach(NEW, 9))
    it.session.answer_transfers([ended])
    assert links.answered[-1] == (NEW, ended)


def test_a_worker_that_leaves_ends_its_transfers() -> None:
    it, _, _, log = worker()
    it.session.handle(OTHER, Gone(Member("other", Role.GPU_WORKER, OTHER, "ipc://o")))
    assert log == [("gone", OTHER)]


def test_transfers_end_before_the_memory_is_freed() -> None:
    it, links, _, log = worker()
    it.session.handle(OLD, Sleep(OLD, 1))
    assert log == ["close", "sleep"] and isinstance(links.answered[-1][1], Slept)
    it.session.handle(OLD, KVAbort(1))
    assert log[-1] == KVAbort(1), "it is answered also asleep"


def worker_without_transfers() -> tuple[Worker, FakeLinks]:
    links = FakeLinks(Member("worker", Role.GPU_WORKER, ME, "ipc://w"))
    it = Worker(links, Runner([]))
    it.session.handle(OLD, Attach(OLD, 9))
    return it, links


def test_a_worker_without_transfers_says_that_each_has_ended() -> None:
    it, links = worker_without_transfers()
    for frame in (RECEIVE, KVAbort(4), KVAbort(5, True), KVAudit(3)):
        it.session.handle(OLD, frame)
    assert links.answered[1:] == [
        (OLD, KVLanded(RECEIVE.transfer, [], [], True)),
        (OLD, KVLanded(4, [], [], True)),
        (OLD, KVSendEnded(5, False)),
        (OLD, KVOpenTransfers(3)),
    ]


def test_a_worker_without_transfers_ignores_sends_and_other_workers() -> None:
    it, links = worker_without_transfers()
    assert links.answered == [(OLD, Attached(OLD, GEOMETRY))]
    it.session.handle(OTHER, Gone(Member("other", Role.GPU_WORKER, OTHER, "ipc://o")))
    it.session.handle(OLD, plan(1, SEND))
    it.step()
    assert [type(frame) for _, frame in links.answered[1:]] == [StepResult]


class PolledLinks(FakeLinks):
    """Records how long the loop would wait, and calls `turn` instead of waiting."""

    def __init__(self, turns: list[object]) -> None:
        super().__init__(Member("worker", Role.GPU_WORKER, ME, "ipc://w"))
        self.turns, self.waits, self.stopped = turns, list[float](), threading.Event()

    def poll(self, timeout_s: float) -> "list[tuple[int, Event | WorkerIn]]":
        self.waits.append(timeout_s)
        if not self.turns:
            self.stopped.set()
            return []
        turn = self.turns.pop(0)
        return [] if not callable(turn) else turn() or []


def test_how_long_the_loop_waits_while_transfers_are_open_without_chores() -> None:
    log = list[object]()
    transfers = Transfers(log)

    def begin() -> None:
        transfers.num_open, transfers.busy = 1, True

    def copy() -> None:
        transfers.needs_polling = True

    def calm() -> None:
        transfers.busy = transfers.needs_polling = False

    def end() -> None:
        transfers.num_open = 0

    links = PolledLinks([begin, None, copy, calm, None, end, None])
    Worker(links, Runner(log), transfers).run(links.stopped)
    busy, calm_s = TRANSFER_POLL_S, CHORE_POLL_S
    assert links.waits == [CHORE_POLL_S, busy, busy, 0.0, calm_s, calm_s, IDLE_POLL_S, IDLE_POLL_S]
    assert log == ["chore", "close"], "a chore only once the transfer had ended"


def test_the_loop_does_not_wait_for_the_plan_of_blocks_that_have_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = list[object](), 100.0
    monkeypatch.setattr(service.time, "monotonic", lambda: now)
    transfers = Transfers(log)

    def land() -> None:
        transfers.answers.append(KVLanded(5, [1, 2], [], True))

    def later() -> None:
        nonlocal now
        now += LANDED_POLL_S

    links = PolledLinks([land, None, later, None])
    Worker(links, Runner(log), transfers).run(links.stopped)
    assert links.waits == [CHORE_POLL_S, 0.0, 0.0, IDLE_POLL_S, IDLE_POLL_S]
    assert log == ["chore", "close"], "a chore only after the plan was due"


def test_transfers_are_closed_and_answered_at_the_end() -> None:
    log = list[object]()
    transfers = Transfers(log)
    links = PolledLinks([lambda: [(OLD, Attach(OLD, 9))]])
    it = Worker(links, Runner(log), transfers)
    close = transfers.close

    def close_with_answer() -> None:
        close()
        transfers.answers.append(KVSendEnded(5, False))

    transfers.close = close_with_answer  # type: ignore[method-assign]
    it.run(links.stopped)
    assert log[-1] == "close" and links.answered[-1] == (OLD, KVSendEnded(5, False))
    assert service.TRANSFER_POLL_S <= 0.001
