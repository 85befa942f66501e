"""When a scheduler counts as stalled."""

from blockyard.services.api_gateway.service import StallDetector
from blockyard.shared.messages import Member, Role, Stats


def scheduler(steps: int, running: int) -> Member:
    return Member("s", Role.SCHEDULER, 1, "ipc:///s", ready=True, stats=Stats(running=running, steps_total=steps))


def test_running_choices_without_a_step_are_a_stall_and_a_step_ends_it() -> None:
    detector = StallDetector(max_step_s=10.0)
    for now in (0.0, 5.0, 10.0):
        detector.observe([scheduler(7, running=1)], now)
        assert not detector.stalled
    detector.observe([scheduler(7, running=1)], 10.5)
    assert detector.stalled == {1}
    detector.observe([scheduler(8, running=1)], 11.0)
    assert not detector.stalled


def test_an_idle_scheduler_and_one_that_left_do_not_stall() -> None:
    detector = StallDetector(max_step_s=10.0)
    detector.observe([scheduler(7, running=0)], 0.0)
    detector.observe([scheduler(7, running=0)], 100.0)
    assert not detector.stalled
    detector.observe([scheduler(7, running=1)], 105.0)
    assert not detector.stalled  # the requests have just started
    detector.observe([scheduler(7, running=1)], 111.0)
    assert detector.stalled == {1}
    detector.observe([], 112.0)
    assert not detector.stalled
