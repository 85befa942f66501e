"""The worker's protocol: attach, order of plans, fencing, with a fake runner."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_links import FakeLinks

from blockyard.services.gpu_worker import counters
from blockyard.services.gpu_worker.__main__ import own_gpu, start_ranks
from blockyard.services.gpu_worker.interfaces import CompletedPlan
from blockyard.services.gpu_worker.service import CHORE_POLL_S, IDLE_POLL_S, Worker
from blockyard.shared.bus.member_list import Gone, Joined
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError, DeviceError, RankLostError
from blockyard.shared.messages import (
    Attach,
    Attached,
    Broken,
    Fenced,
    Geometry,
    Member,
    OutOfStep,
    RankStats,
    Role,
    SlotResult,
    SlotRun,
    Stats,
    StepPlan,
    StepResult,
)
from blockyard.shared.token_ids import unpack

ME, OLD, NEW = 7, 100, 200


class StubNames:
    def blocks_and_hashes(self) -> tuple[list[int], bytes]:
        return [3], b"n" * 16

    def host_blocks_and_hashes(self) -> tuple[list[int], bytes]:
        return [5], b"h" * 16


class StubRunner:
    """A fake runner: two plans may be in flight, and plans in `held` are not done until a test removes them."""

    adapters = None

    def __init__(self) -> None:
        self.geometry = Geometry(8, 16, 64, 100, [1], 4, 32)
        self.block_hashes = StubNames()
        self.log: list[tuple[str, int]] = []
        self.flight: list[StepPlan] = []
        self.held = False
        self.chores = 0
        self.on_sample: Callable[[], None] = lambda: None

    @property
    def in_flight(self) -> int:
        return len(self.flight)

    def count(self, stats: Stats) -> Stats:
        return stats

    def can_launch(self) -> bool:
        return len(self.flight) < 2

    def reset(self, num_slots: int) -> None:
        self.flight.clear()
        self.log.append(("reset", num_slots))

    def join_step(self) -> bool:
        return False

    def idle(self) -> bool:
        self.chores = max(self.chores - 1, 0)
        return self.chores > 0

    def launch(self, plan: StepPlan) -> None:
        self.log.append(("plan", plan.number))
        self.flight.append(plan)

    def sample_rows(self) -> None:
        self.on_sample()

    def collect(self) -> list[CompletedPlan]:
        done = [] if self.held else self.flight[:]
        self.flight = self.flight[len(done) :]
        return [CompletedPlan(p, [SlotResult(r.slot, [5], 1) for r in p.runs], time.time(), 0.001, []) for p in done]


def plan(number: int, scheduler: int = OLD) -> StepPlan:
    return StepPlan(scheduler, number, [], [], [], [SlotRun(2, 1)])


MEMBER = Member("worker", Role.GPU_WORKER, ME, "ipc://w")


def worker() -> tuple[Worker, FakeLinks, StubRunner]:
    links, runner = FakeLinks(MEMBER), StubRunner()
    return Worker(links, runner), links, runner


def test_attach_answers_with_geometry_and_block_hashes() -> None:
    it, links, runner = worker()
    it.session.handle(OLD, Attach(OLD, num_slots=9))
    assert links.answered == [(OLD, Attached(OLD, runner.geometry, [3], b"n" * 16, [5], b"h" * 16))]
    assert runner.log == [("reset", 9)]


def test_plans_are_answered_before_rows_are_sampled_on_the_host() -> None:
    it, links, runner = worker()
    it.session.handle(OLD, Attach(OLD, 9))
    it.session.handle(OLD, plan(1))
    answers: list[int] = []
    runner.on_sample = lambda: answers.append(sum(isinstance(frame, StepResult) for _, frame in links.answered))
    it.step()
    assert answers == [1]


def test_plans_run_in_order_and_each_is_answered() -> None:
    it, links, runner = worker()
    it.session.handle(OLD, Attach(OLD, 9))
    it.session.handle(OLD, plan(1))
    it.session.handle(OLD, plan(2))
    it.step()
    it.step()
    it.step()  # nothing left: does nothing
    assert runner.log[1:] == [("plan", 1), ("plan", 2)]
    answers = [frame for _, frame in links.answered if isinstance(frame, StepResult)]
    assert [(a.number, unpack(a.token_ids)) for a in answers] == [(1, [5]), (2, [5])]
    assert all(a.stamp_s > 1e9 and a.step_s >= 0 for a in answers)


def test_attach_drops_what_is_queued_and_fences_the_older_scheduler() -> None:
    it, links, runner = worker()
    it.session.handle(OLD, Attach(OLD, 9))
    it.session.handle(OLD, plan(1))
    it.session.handle(NEW, Attach(NEW, 5))
    assert (OLD, Fenced()) in links.answered  # told at once, because it may have no more plans to send
    it.step()
    assert ("plan", 1) not in runner.log
    it.session.handle(OLD, plan(2))
    assert links.answered[-1] == (OLD, Fenced())
    it.session.handle(NEW, plan(1, NEW))
    it.step()
    assert links.answered[-1][0] == NEW


def test_a_gap_in_plan_numbers_drops_slots_and_asks_for_an_attach() -> None:
    it, links, runner = worker()
    it.session.handle(OLD, Attach(OLD, 9))
    it.session.handle(OLD, plan(1))
    it.session.handle(OLD, plan(3))
    assert links.answered[-1] == (OLD, OutOfStep(2))
    assert runner.log[-1] == ("reset", 0)
    count = len(links.answered)
    it.session.handle(OLD, plan(4))  # was in flight: one OutOfStep is enough
    it.step()
    assert len(links.answered) == count
    it.session.handle(OLD, Attach(OLD, 9))
    it.session.handle(OLD, plan(1))
    it.step()
    assert runner.log[-1] == ("plan", 1)


def test_a_plan_before_any_attach_is_refused() -> None:
    it, links, _ = worker()
    it.session.handle(OLD, plan(1))
    assert links.answered == [(OLD, Fenced())]


def test_queued_plans_of_a_dead_scheduler_are_not_run() -> None:
    it, _, runner = worker()
    scheduler = Member("scheduler", Role.SCHEDULER, OLD, "ipc://s")
    it.session.handle(OLD, Attach(OLD, 9))
    it.session.handle(OLD, plan(1))
    it.session.handle(NEW, Gone(Member("other", Role.DETOKENIZER, NEW, "")))
    assert len(it.session.plans) == 1
    it.session.handle(OLD, Gone(scheduler))
    it.step()
    assert runner.log == [("reset", 9)]


def test_a_scheduler_wrongly_taken_for_dead_attaches_again() -> None:
    it, links, _ = worker()
    scheduler = Member("scheduler", Role.SCHEDULER, OLD, "ipc://s")
    it.session.handle(OLD, Attach(OLD, 9))
    it.session.handle(OLD, plan(1))
    it.session.handle(OLD, Gone(scheduler))
    it.session.handle(OLD, plan(2))  # ignored: the previous plan was dropped
    it.session.handle(OLD, Joined(scheduler))
    assert links.answered[-1] == (OLD, OutOfStep(1))
    assert not it.session.plans


def test_counters_show_running_and_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "PUBLISH_S", 0.0)
    it, links, _ = worker()
    it.session.handle(OLD, Attach(OLD, 9))
    it.session.handle(OLD, plan(1))
    seen = []
    for _ in range(2):
        it.step()
        it.counters.publish()
        seen.append((links.me.stats.running, links.me.stats.steps_total, links.me.stats.output_tokens_total))
    assert seen == [(1, 1, 1), (0, 1, 1)]
    assert links.me.stats.rss_bytes > 0


def test_counters_tell_steps_with_prefill_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "PUBLISH_S", 0.0)
    it, links, _ = worker()
    for has_prefill, step_s, launch_s in ((True, 0.03, 0.02), (False, 0.002, 0.0005), (True, 0.01, 0.01)):
        done = CompletedPlan(plan(1), [], time.time(), step_s, [], launch_s, has_prefill=has_prefill)
        it.counters.stepped(done)
    it.counters.publish()
    found = links.me.stats
    assert (found.steps_total, found.prefill_steps_total) == (3, 2)
    assert (found.prefill_step_us_total, found.prefill_launch_us_total) == (40_000, 30_000)
    assert (found.decode_step_us_total, found.decode_launch_us_total) == (2_000, 500)


def test_a_scheduler_that_is_listed_only_after_it_attached_is_not_asked_to_attach_again() -> None:
    it, links, _ = worker()
    it.session.handle(OLD, Attach(OLD, 9))
    it.session.handle(OLD, Joined(Member("scheduler", Role.SCHEDULER, OLD, "ipc://s")))
    it.session.handle(OLD, plan(1))
    it.step()
    assert [type(frame) for _, frame in links.answered] == [Attached, StepResult]


def test_the_next_plan_is_launched_while_one_runs_and_results_keep_their_order() -> None:
    it, links, runner = worker()
    it.session.handle(OLD, Attach(OLD, 9))
    runner.held = True
    for number in (1, 2, 3):
        it.session.handle(OLD, plan(number))
        it.step()
    assert runner.log[1:] == [("plan", 1), ("plan", 2)]
    assert [p.number for p in it.session.plans] == [3]  # the runner's maximum is in flight
    assert [type(frame) for _, frame in links.answered] == [Attached]
    runner.held = False
    it.step()
    it.step()
    assert [frame.number for _, frame in links.answered[1:]] == [1, 2, 3]


def test_results_in_flight_of_a_dropped_scheduler_are_dropped() -> None:
    it, links, runner = worker()
    it.session.handle(OLD, Attach(OLD, 9))
    runner.held = True
    it.session.handle(OLD, plan(1))
    it.step()
    it.session.handle(OLD, Gone(Member("scheduler", Role.SCHEDULER, OLD, "ipc://s")))
    runner.held = False
    it.step()
    assert [type(frame) for _, frame in links.answered] == [Attached]
    assert it.counters.steps == 1
    it.session.handle(OLD, Attach(OLD, 9))
    runner.held = True
    it.session.handle(OLD, plan(1))
    it.step()
    it.session.handle(NEW, Attach(NEW, 9))
    assert runner.log[-1] == ("reset", 9)  # waits for plans in flight
    runner.held = False
    it.session.handle(NEW, plan(1, NEW))
    it.step()
    assert [(to, type(frame)) for to, frame in links.answered[-2:]] == [(NEW, Attached), (NEW, StepResult)]


def test_an_error_of_the_device_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    it, links, runner = worker()
    it.session.handle(OLD, Attach(OLD, 9))
    it.session.handle(OLD, plan(1))

    def fails() -> list[CompletedPlan]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(runner, "collect", fails)
    monkeypatch.setattr(links, "poll", lambda timeout_s: [], raising=False)
    with pytest.raises(DeviceError, match="failed with 1 plans in flight: CUDA error: an illegal memory access") as e:
        it.run(threading.Event())
    assert e.value.exit_code == 4
    assert [type(frame) for _, frame in links.answered] == [Attached, Broken]


class StubRanks:
    failure = ""

    def stats(self) -> list[RankStats]:
        return [RankStats(0, 71, 9)]


@pytest.mark.parametrize("in_a_step", [True, False])
@pytest.mark.parametrize("failure", ["rank 1: CUDA error: device-side assert triggered", ""])
def test_the_device_of_another_rank_makes_suspects_and_a_kill_does_not(
    monkeypatch: pytest.MonkeyPatch, failure: str, in_a_step: bool
) -> None:
    links, runner, ranks, stopped = FakeLinks(MEMBER), StubRunner(), StubRanks(), threading.Event()
    it = Worker(links, runner, None, ranks)
    it.session.handle(OLD, Attach(OLD, 9))
    it.session.handle(OLD, plan(1))

    def fails() -> list[CompletedPlan]:
        ranks.failure = failure
        if in_a_step:
            raise RankLostError("rank 0 of 2 lost another rank")
        stopped.set()
        return []

    monkeypatch.setattr(runner, "collect", fails)
    monkeypatch.setattr(links, "poll", lambda timeout_s: [], raising=False)
    if failure:
        with pytest.raises(DeviceError, match="rank 1: CUDA error"):
            it.run(stopped)
        assert isinstance(links.answered[-1][1], Broken)
    elif in_a_step:
        with pytest.raises(RankLostError):
            it.run(stopped)
    if not failure:
        assert [type(frame) for _, frame in links.answered] == [Attached]


def test_plans_in_flight_are_answered_before_it_ends() -> None:
    it, links, runner = worker()
    it.session.handle(OLD, Attach(OLD, 9))
    runner.held = True
    it.session.handle(OLD, plan(1))
    it.step()
    runner.held = False
    stopped = threading.Event()
    stopped.set()
    it.run(stopped)
    assert [frame.number for _, frame in links.answered[1:]] == [1]


def test_each_replica_uses_its_own_visible_gpu() -> None:
    assert [own_gpu(None, i) for i in (0, 3)] == ["0", "3"]
    assert [own_gpu("4, 6", i) for i in (0, 1)] == ["4", "6"]


def test_more_ranks_than_gpus_are_refused_before_one_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidiactl", "nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    process = ProcessConfig(name="worker", bus=BusConfig(registry="ipc:///unused", bind="ipc:///unused"))
    config = WorkerConfig(process=process, model_path="", tensor_parallel_size=3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ConfigError, match="size 3: each rank needs its own GPU, and there are 2 here"):
        start_ranks(config, tmp_path / "nvidiactl")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(ConfigError, match="there are 1 here"):
        start_ranks(config, tmp_path / "nvidiactl")


def test_chores_run_while_idle_without_waiting_for_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    it, links, runner = worker()
    runner.chores = 3
    stopped = threading.Event()
    waits: list[float] = []

    def poll(timeout_s: float) -> list[tuple[int, StepPlan]]:
        waits.append(timeout_s)
        if timeout_s == IDLE_POLL_S:
            stopped.set()
        return [(OLD, plan(1))] if len(waits) == 2 else []

    monkeypatch.setattr(links, "poll", poll, raising=False)
    it.run(stopped)
    assert waits == [CHORE_POLL_S, 0.0, CHORE_POLL_S, 0.0, IDLE_POLL_S], "a pause before the first piece alone"
    assert runner.chores == 0


def test_chores_wait_for_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece takes as long as the arranging of several adapters, which a start and requests wait for."""
    it, links, runner = worker()
    runner.chores, stopped, seen = 2, threading.Event(), list[int]()

    def poll(timeout_s: float) -> list[tuple[int, StepPlan]]:
        seen.append(runner.chores)
        if len(seen) == 6:
            stopped.set()
        return []

    monkeypatch.setattr(links, "poll", poll, raising=False)
    monkeypatch.setattr(it.session, "is_loading_adapters", lambda is_idle: len(seen) < 4)
    it.run(stopped)
    assert seen == [2, 1, 1, 1, 1, 0], "the first piece is begun before an adapter is asked for"
