"""Plans leave shortly before the device needs them, and none of them too late."""

import math

import pytest

from blockyard.services.scheduler.batch.plan_pacer import LEAD_S, MOST_AHEAD, MOST_LEAD_S, Departures
from blockyard.services.scheduler.batch.step_times import Load
from blockyard.services.scheduler.wakeup_timers import SLACK_S, Alarms
from blockyard.services.scheduler.workers.worker_groups import BatchLimits, WorkerGroup
from blockyard.shared.messages import Geometry

ONE = Load(1, 0)


class Device:
    """Runs what a departures lets go, each step as long as the test says."""

    def __init__(self, departures: Departures, hop_s: float = 0.0) -> None:
        self.departures, self.hop_s = departures, hop_s
        self.ends: list[float] = []
        self.now = self.free_at = self.idle_s = 0.0
        self.most = 0

    def step(self, step_s: float, load: Load = ONE) -> None:
        """Plans leave until the oldest is done; that one is answered."""
        while not self.ends or self.departures.due_s <= self.ends[0]:
            self.now = max(self.now, self.departures.due_s)
            begins = max(self.free_at, self.now + self.hop_s)
            self.idle_s += begins - self.free_at if self.ends else 0.0
            self.free_at = begins + step_s
            self.departures.sent(load, self.now)
            self.ends.append(self.free_at)
            self.most = max(self.most, len(self.ends))
        self.now = self.ends.pop(0)
        self.departures.answered(step_s, 0.0, self.now, self.now)


@pytest.mark.parametrize(
    ("ahead", "num_sent"), [(0, [True]), (2, [True, True, True])], ids=["lockstep", "so many as asked for"]
)
def test_a_number_of_plans_is_what_it_says(ahead: int, num_sent: list[bool]) -> None:
    departures = Departures(0.004, ahead)
    for _ in num_sent:
        assert departures.due_s == 0
        departures.sent(ONE, 0.0)
    assert departures.due_s == math.inf
    departures.answered(0.004, 0.0, 1.0, 1.0)
    assert departures.due_s == 0


def test_nothing_is_known_of_the_first_step() -> None:
    departures = Departures(0.0, None)
    assert departures.due_s == 0
    departures.sent(ONE, 5.0)
    assert departures.due_s <= 5, "one is ahead"
    departures.sent(ONE, 5.0)
    assert departures.due_s == math.inf


@pytest.mark.parametrize(
    ("step_s", "most"),
    [(0.0001, MOST_AHEAD + 1), (0.0005, 6), (0.001, 4), (0.005, 2), (0.05, 2)],
)
def test_plans_under_way_cover_the_lead_and_no_more(step_s: float, most: int) -> None:
    device = Device(Departures(step_s, None))
    for _ in range(300):
        device.step(step_s)
    assert device.idle_s == 0
    assert device.most <= most
    left_s = device.free_at - device.now
    assert left_s <= max(LEAD_S, step_s) + step_s / 10


def test_a_long_step_has_its_successor_at_its_end() -> None:
    departures = Departures(0.005, None)
    departures.sent(ONE, 10.0)
    departures.answered(0.05, 0.0, 10.05, 10.05)
    for _ in range(100):
        departures.sent(ONE, 0.0)
        departures.answered(0.05, 0.0, 0.05, 0.05)
    departures.sent(ONE, 20.0)
    assert 20.03 < departures.due_s <= 20.05 - LEAD_S


def test_a_device_that_waits_gets_its_plans_sooner() -> None:
    """Here a plan is on its way for longer than the lead."""
    device = Device(Departures(0.02, None), hop_s=LEAD_S + 0.002)
    for _ in range(50):
        device.step(0.02)
    device.idle_s = 0.0
    for _ in range(200):
        device.step(0.02)
    assert device.idle_s < 200 * 0.0005, "a few steps begin late while what was added fades"
    departures = Departures(0.02, None)
    for at in range(20):
        departures.sent(ONE, at)
        departures.sent(ONE, at)
        departures.answered(0.02, 0.0, at * 0.026, at * 0.026)
        departures.answered(0.02, 0.0, at * 0.026 + 0.025, at * 0.026)
    departures.sent(ONE, 1000.0)
    assert departures.due_s >= 1000.0 + 0.01 - MOST_LEAD_S, "it is bounded"


def test_an_alarm_goes_off_when_a_plan_may_leave() -> None:
    group = WorkerGroup(7, Geometry(8, 16, 64, 100, [1], 4, 32, step_s=0.02), BatchLimits(4, 32, None, late=True))
    alarms = Alarms()
    assert alarms.may_send(group, 3.0)
    assert alarms.next() is None
    group.departures.sent(ONE, 3.0)
    assert not alarms.may_send(group, 3.0)
    assert not alarms.may_send(group, 3.001), "an alarm is set once"
    at = alarms.next()
    assert at == pytest.approx(3.02 - LEAD_S - SLACK_S, abs=1e-5)
    assert alarms.take(at - 0.001) == []
    assert alarms.take(at) == [7]
    assert alarms.next() is None
    assert alarms.may_send(group, at)


def test_a_step_that_waits_for_its_launch_is_launched_sooner() -> None:
    def due_s(launch_s: float) -> float:
        departures = Departures(0.01, None)
        for at in range(10):
            departures.sent(ONE, at)
            departures.sent(ONE, at)
            departures.answered(0.01, launch_s, at * 0.02, at)
            departures.answered(0.01, launch_s, at * 0.02 + 0.01, at)
        departures.sent(ONE, 100.0)
        return departures.due_s - 100.0

    assert due_s(0.001) == pytest.approx(0.01 - LEAD_S, abs=0.0005), "the device was busy long after the launch"
    assert due_s(0.01) == pytest.approx(0.01 - MOST_LEAD_S, abs=0.0005)
