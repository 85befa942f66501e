"""Pause and resume, sleep and wake-up, cache resets: no running request is lost."""

import pytest

from blockyard.shared.messages import Control, Controlled, ControlVerb, MemoryTag, Sleep, StepPlan

from ..conftest import Ring


def tell(it: Ring, verb: ControlVerb, **more: object) -> None:
    it.world.tell(it.gateway.incarnation, Control(f"{verb.name}", verb, **more))


def answers(it: Ring) -> list[tuple[str, int]]:
    return [(answer.request_id, answer.status) for answer in it.gateway.controlled]


def last(it: Ring) -> Controlled:
    return it.gateway.controlled[-1]


def num_steps(it: Ring) -> int:
    return it.world.core.stats().steps_total


@pytest.mark.parametrize("level", [1, 2])
def test_requests_wait_while_the_workers_sleep_and_go_on_where_they_were(ring: type[Ring], level: int) -> None:
    it = ring()
    it.submit("a", 10, max_tokens=20)
    it.steps(5)
    before = len(it.output("a").ids)
    tell(it, ControlVerb.SLEEP, level=level)
    assert answers(it) == [], "the worker has not said that it sleeps"
    it.world.settle()
    assert answers(it) == [("SLEEP", 200)]
    assert last(it).sleep_level == level
    it.submit("b", 7, max_tokens=3)
    steps = num_steps(it)
    it.world.settle()
    stats = it.world.core.stats()
    assert (num_steps(it), stats.running, stats.waiting, it.world.core.phase) == (steps, 0, 2, "asleep")
    tell(it, ControlVerb.WAKE_UP)
    it.finish()
    assert answers(it)[1:] == [("WAKE_UP", 200)]
    assert last(it).sleep_level == 0
    assert before > 0
    assert [len(it.output(r).ids) for r in "ab"] == [20, 3]


def test_a_second_sleep_changes_the_level_only_upwards(ring: type[Ring]) -> None:
    it = ring()
    for level in (1, 1, 2, 1):
        tell(it, ControlVerb.SLEEP, level=level)
        it.world.settle()
    assert [o.frame.level for o in it.world.sent if isinstance(o.frame, Sleep)] == [1, 2]
    assert [answer.sleep_level for answer in it.gateway.controlled] == [1, 1, 2, 2]
    for _ in range(2):
        tell(it, ControlVerb.WAKE_UP)
        it.world.settle()
    assert [answer.sleep_level for answer in it.gateway.controlled][4:] == [0, 0]
    it.submit("a", 5)
    it.finish()


def test_sleep_needs_its_flag_and_a_level(ring: type[Ring]) -> None:
    it = ring(may_sleep=False)
    tell(it, ControlVerb.SLEEP)
    assert "--enable-sleep-mode" in last(it).message
    awake = ring()
    tell(awake, ControlVerb.SLEEP, level=3)
    assert (last(it).status, last(awake).status) == (400, 400)
    awake.submit("a", 5)
    awake.finish()


def test_memory_parts_are_restored_one_after_the_other(ring: type[Ring]) -> None:
    it = ring()
    it.submit("a", 10, max_tokens=20)
    it.steps(5)
    tell(it, ControlVerb.WAKE_UP, tags=[MemoryTag.WEIGHTS])
    it.world.settle()
    assert answers(it) == [("WAKE_UP", 200)], "nothing sleeps"
    tell(it, ControlVerb.SLEEP)
    tell(it, ControlVerb.WAKE_UP, tags=[MemoryTag.WEIGHTS])
    assert len(answers(it)) == 1, "the worker has done neither"
    it.world.settle()
    assert answers(it)[1:] == [("SLEEP", 200), ("WAKE_UP", 200)]
    assert (last(it).sleep_level, it.world.core.phase, it.worker.woken) == (
        1,
        "asleep",
        {MemoryTag.WEIGHTS},
    )
    late = it.world.add_worker()
    it.world.settle()
    assert (late.runner.level, late.woken) == (1, {MemoryTag.WEIGHTS})
    tell(it, ControlVerb.SLEEP)
    it.world.settle()
    assert not it.worker.woken, "that part sleeps again"
    for tags in ([MemoryTag.KV_CACHE], [MemoryTag.KV_CACHE], [MemoryTag.WEIGHTS]):
        assert it.world.core.phase == "asleep"
        tell(it, ControlVerb.WAKE_UP, tags=tags)
        it.world.settle()
    assert [status for _, status in answers(it)] == [200] * 7
    assert (last(it).sleep_level, late.runner.level) == (0, 0)
    it.finish()
    assert len(it.output("a").ids) == 20


def test_a_worker_that_joins_sleeps_too_and_a_worker_that_dies_asleep_is_not_waited_for(ring: type[Ring]) -> None:
    it = ring()
    tell(it, ControlVerb.SLEEP)
    it.world.settle()
    late = it.world.add_worker()
    it.world.settle()
    assert late.runner.level == 1
    it.submit("a", 5)
    it.world.settle()
    assert it.world.core.stats().waiting == 1
    it.world.kill(it.worker.incarnation)
    tell(it, ControlVerb.WAKE_UP)
    it.finish()
    assert answers(it)[-1] == ("WAKE_UP", 200)


def test_a_wake_up_before_the_sleep_is_done_is_answered(ring: type[Ring]) -> None:
    it = ring()
    tell(it, ControlVerb.SLEEP)
    tell(it, ControlVerb.WAKE_UP)
    it.world.settle()
    assert answers(it) == [("SLEEP", 409), ("WAKE_UP", 200)]
    it.submit("a", 5)
    it.finish()


def test_a_full_queue_while_workers_sleep_is_a_503(ring: type[Ring]) -> None:
    it = ring(max_queue_len=1)
    tell(it, ControlVerb.SLEEP)
    it.world.settle()
    it.submit("a", 5)
    it.submit("b", 5)
    refused = it.journal("b").refused
    assert refused is not None
    assert (refused.status, refused.capacity.asleep) == (503, True)
    tell(it, ControlVerb.WAKE_UP)
    it.finish()


@pytest.mark.parametrize("clear", [True, False])
def test_paused_requests_stop_and_resume(ring: type[Ring], clear: bool) -> None:
    it = ring()
    it.submit("a", 10, max_tokens=20)
    it.steps(4)
    tell(it, ControlVerb.PAUSE, clear_cache=clear)
    it.world.settle()
    assert answers(it) == [("PAUSE", 200)]
    it.submit("b", 6)
    it.world.settle()
    assert not it.output("b").ids
    assert len(it.output("a").ids) < 20
    assert it.world.core.phase == "paused"
    starts = sum(len(o.frame.starts) for o in it.world.sent if isinstance(o.frame, StepPlan))
    tell(it, ControlVerb.RESUME)
    it.finish()
    more = sum(len(o.frame.starts) for o in it.world.sent if isinstance(o.frame, StepPlan)) - starts
    assert more == (2 if clear else 1), "with another cache what ran starts again"


@pytest.mark.parametrize("clear", [True, False])
def test_a_pause_that_waits_is_answered_when_all_that_ran_has_ended(ring: type[Ring], clear: bool) -> None:
    it = ring()
    it.submit("a", 10, max_tokens=20)
    it.steps(4)
    tell(it, ControlVerb.PAUSE, drain=True, clear_cache=clear)
    it.submit("b", 6)
    it.steps(4)
    assert answers(it) == []
    it.world.settle()
    assert answers(it) == [("PAUSE", 200)]
    assert (len(it.output("a").ids), it.output("b").ids) == (20, [])
    tell(it, ControlVerb.RESUME)
    it.submit("a again", 10)
    it.finish()
    assert bool(it.output("a again").num_cached_tokens) != clear


def test_a_reset_cache_finds_nothing(ring: type[Ring]) -> None:
    it = ring(num_host_blocks=8, num_blocks=16)
    it.submit("a", 20, max_tokens=3)
    it.world.settle()
    it.submit("b", 20, max_tokens=3)
    it.world.settle()
    tell(it, ControlVerb.RESET_PREFIX_CACHE)
    it.world.settle()
    assert answers(it) == [("RESET_PREFIX_CACHE", 200)]
    it.submit("c", 20, max_tokens=3)
    it.finish()
    assert it.output("b").num_cached_tokens
    assert not it.output("c").num_cached_tokens


@pytest.mark.parametrize("when", ["before it is asked", "before it answers", "twice before it answers", "and again"])
def test_a_reset_reaches_a_worker_that_is_not_attached(ring: type[Ring], when: str) -> None:
    it = ring()
    worker = it.worker.incarnation
    it.submit("a", 20, max_tokens=3)
    it.world.settle()
    if when == "before it is asked":
        it.world.core.on_member_lost(worker)  # the link breaks, and the worker keeps its blocks
        tell(it, ControlVerb.RESET_PREFIX_CACHE)
    it.world.blink(worker)
    if when != "before it is asked":
        tell(it, ControlVerb.RESET_PREFIX_CACHE)
        assert answers(it) == [], "the worker has not answered"
    if when == "twice before it answers":
        tell(it, ControlVerb.RESET_PREFIX_CACHE)
    if when == "and again":
        it.world.blink(worker)  # before it has taken the Attach
    it.world.settle()
    assert {*answers(it)} == {("RESET_PREFIX_CACHE", 200)}
    it.submit("b", 20, max_tokens=3)
    it.finish()
    assert not it.output("b").num_cached_tokens
    it.world.blink(worker)
    it.world.settle()
    it.submit("c", 20, max_tokens=3)
    it.finish()
    assert it.output("c").num_cached_tokens, "what was cached after the reset is kept"


def test_asking_for_the_status_changes_nothing(ring: type[Ring]) -> None:
    it = ring()
    tell(it, ControlVerb.STATUS)
    assert last(it) == Controlled("STATUS", 200, "", 0, False)
