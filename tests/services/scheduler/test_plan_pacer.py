"""Plans are sent shortly before the device needs them, by the predicted times of steps."""

import math
import random

import pytest

from blockyard.services.scheduler.plan_pacer import (
    MAX_PLANS_AHEAD,
    MAX_SEND_AHEAD_S,
    MOST_TOKENS,
    SEND_AHEAD_S,
    TIMER_SLACK_S,
    PlanPacer,
    StepLoad,
    StepTimes,
    WakeupTimers,
)

ONE = StepLoad(1, 0)


class Device:
    """Runs each plan when the pacer sends it; the test says how long a step takes."""

    def __init__(self, pacer: PlanPacer, hop_s: float = 0.0) -> None:
        self.pacer, self.hop_s = pacer, hop_s
        self.ends: list[float] = []
        self.now = self.free_at = self.idle_s = 0.0
        self.most = 0

    def step(self, step_s: float, load: StepLoad = ONE) -> None:
        """Sends plans until the oldest is done, and answers that one."""
        while not self.ends or self.pacer.next_send_s <= self.ends[0]:
            self.now = max(self.now, self.pacer.next_send_s)
            begins = max(self.free_at, self.now + self.hop_s)
            self.idle_s += begins - self.free_at if self.ends else 0.0
            self.free_at = begins + step_s
            self.pacer.on_sent(load, self.now)
            self.ends.append(self.free_at)
            self.most = max(self.most, len(self.ends))
        self.now = self.ends.pop(0)
        self.pacer.on_completed(step_s, 0.0, self.now, self.now)


@pytest.mark.parametrize(
    ("ahead", "num_sent"), [(0, [True]), (2, [True, True, True])], ids=["lockstep", "so many as asked for"]
)
def test_a_fixed_number_of_plans_is_sent_ahead(ahead: int, num_sent: list[bool]) -> None:
    pacer = PlanPacer(0.004, ahead)
    for _ in num_sent:
        assert pacer.next_send_s == 0
        pacer.on_sent(ONE, 0.0)
    assert pacer.next_send_s == math.inf
    pacer.on_completed(0.004, 0.0, 1.0, 1.0)
    assert pacer.next_send_s == 0


def test_without_a_known_step_time_one_plan_is_sent_ahead() -> None:
    pacer = PlanPacer(0.0, None)
    assert pacer.next_send_s == 0
    pacer.on_sent(ONE, 5.0)
    assert pacer.next_send_s <= 5, "one is ahead"
    pacer.on_sent(ONE, 5.0)
    assert pacer.next_send_s == math.inf


@pytest.mark.parametrize(
    ("step_s", "most"),
    [(0.0001, MAX_PLANS_AHEAD + 1), (0.0005, 6), (0.001, 4), (0.005, 2), (0.05, 2)],
)
def test_plans_under_way_cover_the_lead_and_no_more(step_s: float, most: int) -> None:
    device = Device(PlanPacer(step_s, None))
    for _ in range(300):
        device.step(step_s)
    assert device.idle_s == 0
    assert device.most <= most
    left_s = device.free_at - device.now
    assert left_s <= max(SEND_AHEAD_S, step_s) + step_s / 10


def test_a_long_step_has_its_successor_at_its_end() -> None:
    pacer = PlanPacer(0.005, None)
    pacer.on_sent(ONE, 10.0)
    pacer.on_completed(0.05, 0.0, 10.05, 10.05)
    for _ in range(100):
        pacer.on_sent(ONE, 0.0)
        pacer.on_completed(0.05, 0.0, 0.05, 0.05)
    pacer.on_sent(ONE, 20.0)
    assert 20.03 < pacer.next_send_s <= 20.05 - SEND_AHEAD_S


def test_plans_are_sent_earlier_after_late_steps() -> None:
    """Here a plan takes longer to arrive than the lead."""
    device = Device(PlanPacer(0.02, None), hop_s=SEND_AHEAD_S + 0.002)
    for _ in range(50):
        device.step(0.02)
    device.idle_s = 0.0
    for _ in range(200):
        device.step(0.02)
    assert device.idle_s < 200 * 0.0005, "a few steps begin late while what was added fades"
    pacer = PlanPacer(0.02, None)
    for at in range(20):
        pacer.on_sent(ONE, at)
        pacer.on_sent(ONE, at)
        pacer.on_completed(0.02, 0.0, at * 0.026, at * 0.026)
        pacer.on_completed(0.02, 0.0, at * 0.026 + 0.025, at * 0.026)
    pacer.on_sent(ONE, 1000.0)
    assert pacer.next_send_s >= 1000.0 + 0.01 - MAX_SEND_AHEAD_S, "it is bounded"


def test_a_timer_runs_out_when_a_plan_may_be_sent() -> None:
    pacer = PlanPacer(0.02, None)
    timers = WakeupTimers()
    assert timers.may_send(7, pacer, 3.0)
    assert timers.next() is None
    pacer.on_sent(ONE, 3.0)
    assert not timers.may_send(7, pacer, 3.0)
    assert not timers.may_send(7, pacer, 3.001), "an alarm is set once"
    at = timers.next()
    assert at == pytest.approx(3.02 - SEND_AHEAD_S - TIMER_SLACK_S, abs=1e-5)
    assert timers.take_due(at - 0.001) == []
    assert timers.take_due(at) == [7]
    assert timers.next() is None
    assert timers.may_send(7, pacer, at)


def test_plans_are_sent_earlier_if_steps_wait_for_their_launch() -> None:
    def next_send_s(launch_s: float) -> float:
        pacer = PlanPacer(0.01, None)
        for at in range(10):
            pacer.on_sent(ONE, at)
            pacer.on_sent(ONE, at)
            pacer.on_completed(0.01, launch_s, at * 0.02, at)
            pacer.on_completed(0.01, launch_s, at * 0.02 + 0.01, at)
        pacer.on_sent(ONE, 100.0)
        return pacer.next_send_s - 100.0

    assert next_send_s(0.001) == pytest.approx(0.01 - SEND_AHEAD_S, abs=0.0005), (
        "the device was busy long after the launch"
    )
    assert next_send_s(0.01) == pytest.approx(0.01 - MAX_SEND_AHEAD_S, abs=0.0005)


def cost(load: StepLoad, scale: float = 1.0) -> float:
    return scale * (0.0046 + 35e-6 * load.decodes + 22e-6 * load.tokens)


def learn(times: StepTimes, loads: list[StepLoad], scale: float = 1.0) -> None:
    for load in loads:
        times.record(load, cost(load, scale))


def mixed(seed: int, num: int) -> list[StepLoad]:
    rng = random.Random(seed)
    return [StepLoad(rng.randrange(200, 256), rng.choice([0, 0, 200, 600, 2048])) for _ in range(num)]


@pytest.mark.parametrize("prior_s", [0.0, 0.0046])
def test_a_cost_model_is_found_in_mixed_steps(prior_s: float) -> None:
    times = StepTimes(prior_s)
    learn(times, mixed(1, 200))
    for load in (StepLoad(220, 0), StepLoad(240, 512), StepLoad(256, 2048)):
        assert times.expected_s(load) == pytest.approx(cost(load), rel=0.03)
        assert 0.8 * cost(load) < times.lower_bound(load) <= cost(load) * 1.03
    assert times.tokens_within(0.011) == pytest.approx(500, rel=0.05)


def test_the_cost_model_follows_a_change() -> None:
    times = StepTimes(0.0046)
    learn(times, mixed(1, 200))
    learn(times, mixed(2, 200), scale=2.0)
    assert times.expected_s(StepLoad(240, 512)) == pytest.approx(2 * cost(StepLoad(240, 512)), rel=0.03)


def test_costs_that_steps_do_not_determine_stay_unchanged() -> None:
    times = StepTimes(0.0046)
    learn(times, [StepLoad(256, 0)] * 1000)
    assert times.expected_s(StepLoad(256, 0)) == pytest.approx(cost(StepLoad(256, 0)), rel=0.001)
    assert times.expected_s(StepLoad(0, 0)) == pytest.approx(0.0046, rel=0.2)
    assert times.tokens_within(1.0) == MOST_TOKENS, "no prompt was seen"


def test_steps_that_vary_are_expected_to_end_early() -> None:
    times, rng = StepTimes(0.0), random.Random(3)
    for _ in range(300):
        times.record(StepLoad(8, 0), rng.uniform(0.005, 0.015))
    assert times.expected_s(StepLoad(8, 0)) == pytest.approx(0.01, rel=0.15)
    assert times.lower_bound(StepLoad(8, 0)) <= 0.006


def test_a_result_without_a_step_time_changes_nothing() -> None:
    times = StepTimes(0.0)
    times.record(StepLoad(1, 0), 0.0)
    assert not times.is_known
    assert times.expected_s(StepLoad(1, 0)) == 0
