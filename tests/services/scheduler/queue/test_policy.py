"""Lines of batch files run where no online request needs the place, under every policy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.services.scheduler.queue.policy import BATCH_CLASS
from blockyard.services.scheduler.sequences.requests import QueueAmount
from blockyard.shared.messages import StepPlan

from ..conftest import Ring

POLICIES = ["fcfs", "priority", "fair"]
BUSY = {"max_num_seqs": 2, "num_blocks": 200, "max_model_len": 400, "depth": 0}


def running_ids(it: Ring) -> list[str]:
    return [running.sequence.request.id for running in it.world.core.groups[it.worker.incarnation].running]


def started(it: Ring) -> list[int]:
    """Lengths of the prompts that started, in order."""
    plans = [o.frame for o in it.world.sent if isinstance(o.frame, StepPlan)]
    return [start.num_prompt_tokens for plan in plans for start in plan.starts]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_online_request_starts_before_older_lines(ring: type[Ring], policy: str) -> None:
    it = ring(policy=policy, max_num_seqs=1)
    it.submit("first", 5)
    it.submit("line", 6, batch_line=True, priority=-9)
    it.submit("online", 7, priority=9)
    it.finish()
    assert list(dict.fromkeys(started(it))) == [5, 7, 6]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_line_gives_its_slot_to_an_online_request_and_goes_on_later(ring: type[Ring], policy: str) -> None:
    it = ring(policy=policy, **BUSY)
    it.submit("line 1", 5, max_tokens=30, batch_line=True)
    it.submit("line 2", 6, max_tokens=30, batch_line=True)
    it.steps(3)
    it.submit("online", 7, max_tokens=3)
    it.steps(2)
    assert set(running_ids(it)) == {"line 1", "online"}, "the newer line gave way"
    it.finish()
    assert it.world.core.stats().displaced_total == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_online_requests_that_come_together_start_in_one_plan_beside_lines(ring: type[Ring], policy: str) -> None:
    """Also where each has a class of its own: none waits for the plan after the next one."""
    it = ring(policy=policy, **(BUSY | {"max_num_seqs": 6}))
    for name in ("line 1", "line 2"):
        it.submit(name, 5, max_tokens=30, batch_line=True)
    it.steps(3)
    for count, name in enumerate(("one", "two", "three")):
        it.submit(name, 2 + count, max_tokens=9, salt=name)
    it.steps(2)
    plans = [o.frame for o in it.world.sent if isinstance(o.frame, StepPlan)]
    [together] = [plan.starts for plan in plans if any(start.num_prompt_tokens < 5 for start in plan.starts)]
    assert [start.num_prompt_tokens for start in together] == [2, 3, 4]
    it.finish()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_line_gives_its_blocks_to_an_online_request(ring: type[Ring], policy: str) -> None:
    it = ring(policy=policy, num_blocks=12, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
    it.submit("line", 40, max_tokens=6, batch_line=True)
    it.steps(2)
    it.submit("online", 19, max_tokens=4, salt="other")
    it.steps(3)
    assert running_ids(it) == ["online"]
    it.finish()


@pytest.mark.parametrize("policy", POLICIES)
def test_no_line_preempts_anything(ring: type[Ring], policy: str) -> None:
    it = ring(policy=policy, **BUSY)
    it.submit("online", 5, max_tokens=20, tenant="a")
    it.submit("line 1", 6, max_tokens=20, batch_line=True, tenant="b")
    it.steps(2)
    it.submit("line 2", 7, max_tokens=5, batch_line=True, tenant="c", priority=-100)
    it.finish()
    assert it.world.core.stats().preemptions_total == 0


def test_lines_that_wait_take_no_place_of_an_online_request(ring: type[Ring]) -> None:
    it = ring(max_queue_len=3, max_queue_tokens=60, **(BUSY | {"max_num_seqs": 1}))
    it.submit("running", 5, max_tokens=50)
    it.steps(2)
    for i in range(3):
        it.submit(f"line {i}", 20, batch_line=True)
    it.submit("line 3", 5, batch_line=True)
    assert it.journal("line 3").refused is not None, "the lines have filled the queue"
    capacity = it.journal("line 3").refused.capacity
    assert (capacity.choices, capacity.tokens) == (3, 60), "for online requests it is empty"
    for i in range(3):
        it.submit(f"online {i}", 20)
        assert it.journal(f"online {i}").refused is None
    it.submit("online 3", 20)
    assert it.journal("online 3").refused is not None
    it.finish()


def test_running_lines_do_not_count_for_the_wait_of_an_online_request(ring: type[Ring]) -> None:
    def wait_s(lines: bool) -> float:
        it = ring(max_queue_len=100, **BUSY)
        for i in range(2):
            it.submit(f"running {i}", 5, max_tokens=300, batch_line=lines)
        for _ in range(60):
            it.steps(2)
            it.world.now += 0.3
        return it.world.core.wait_estimate.seconds(QueueAmount(1, 5))

    assert wait_s(lines=False) > 10
    assert wait_s(lines=True) < 1


def test_without_lines_fcfs_has_no_classes(ring: type[Ring]) -> None:
    it = ring(**BUSY)
    it.submit("online", 5, max_tokens=9)
    it.steps(2)
    policy = it.world.core.waiting.policy
    assert not policy.has_classes
    it.submit("line", 5, max_tokens=9, batch_line=True)
    it.steps(2)
    assert policy.has_classes
    running = it.world.core.groups[it.worker.incarnation].running
    assert [one.key[0] == BATCH_CLASS for one in running] == [False, True]
    it.finish()
    assert not policy.has_classes


events = st.lists(
    st.tuples(st.booleans(), st.integers(1, 40), st.integers(1, 12), st.just(1), st.integers(0, 3)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(POLICIES), st.integers(1, 4), st.integers(2, 6), events)
def test_lines_hold_nothing_that_an_online_request_waits_for(
    policy: str, max_num_seqs: int, max_queue_len: int, steps: list[tuple[bool, int, int, int, int]]
) -> None:
    """With room for all blocks and tokens, no line runs beside a waiting online request, and none fills the queue."""
    it = Ring(
        **{"policy": policy, "max_num_seqs": max_num_seqs, "max_queue_len": max_queue_len, "num_blocks": 400},
        **{"max_num_batched_tokens": 512, "max_model_len": 100, "depth": 0},
    )
    core = it.world.core
    for number, (is_line, num_prompt, max_tokens, n, rounds) in enumerate(steps):
        waits, name = core.waiting.usage.amount.sequences, str(number)
        more = {"tenant": f"t{number % 3}", "batch_line": is_line, "max_tokens": max_tokens, "salt": name}
        group = core.groups[it.worker.incarnation]
        it.submit(name, num_prompt, n, **more)
        sent = group.plan_clock.last_sent
        if not is_line and waits + n <= max_queue_len:
            assert it.journal(name).refused is None
        for _ in range(rounds):
            it.world.work(it.worker)
            while it.detokenizer.inbox:
                it.world.detokenize(it.detokenizer)
            first = core.waiting.peek()
            is_online = first is not None and not first.request.is_batch_line and not first.awaits_results()
            if is_online and group.plan_clock.last_sent > sent:
                assert not any(one.sequence.request.is_batch_line for one in group.running)
    it.finish()


def test_a_line_takes_no_spare_slot(ring: type[Ring]) -> None:
    """A freed slot is pending while plans are in flight: an online request may use a spare one, a line waits."""
    it = ring(**(BUSY | {"depth": 2}))
    for name in ("line 1", "line 2", "line 3"):
        it.submit(name, 5, max_tokens=30, batch_line=True)
    it.steps(3)
    group = it.world.core.groups[it.worker.incarnation]
    assert running_ids(it) == ["line 1", "line 2"] and group.slots.num_free == 1
    it.world.core.lifecycle.drop(it.world.core.lifecycle.requests["line 1"])
    assert group.can_schedule and not group.can_schedule_batch_line
    it.journal("line 1").cancelled = True
    it.finish()
