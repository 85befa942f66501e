"""Which children count as hung, without processes and in virtual time."""

import pytest

from blockyard.services.launcher.supervision.hung import LONG_TURN_TIMES, STARTING_TIMES, HungDetector
from blockyard.shared.process.liveness import RUNNING, SIGN_S, TURNED

TIMEOUT_S = 10.0
LOADS, SERVES, FROZEN = RUNNING, TURNED, b""


class Ring:
    """Three children; `run` advances by half a second, as the launcher does."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.hung = HungDetector(timeout_s, long_turns=["gpu_worker"])
        self.now = 100.0
        self.starts = {"message_bus": 1, "detokenizer 0": 1, "gpu_worker": 1}
        self.signs = dict.fromkeys(self.starts, SERVES)  # what each child writes in half a second
        self.settled = True
        self.killed: list[tuple[str, float]] = []
        self.began = self.now
        self.run(1)

    def set(self, name: str, signs: bytes) -> None:
        self.began, self.signs[name] = self.now, signs

    def run(self, seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            for name, start in self.starts.items():
                self.hung.on_running(name, start, self.signs[name], self.now)
            for name, silent_s in self.hung.find_hung(self.now, self.settled).items():
                self.killed.append((name, self.now - self.began))
                assert silent_s >= TIMEOUT_S


@pytest.fixture
def ring() -> Ring:
    return Ring()


def test_no_child_that_gives_signs_is_killed(ring: Ring) -> None:
    ring.run(1000)
    assert not ring.killed


@pytest.mark.parametrize("name", ["detokenizer 0", "gpu_worker", "message_bus"])
def test_a_frozen_child_is_killed_once_after_the_timeout(ring: Ring, name: str) -> None:
    ring.set(name, FROZEN)
    ring.run(100)
    assert ring.killed == [(name, TIMEOUT_S + SIGN_S)]


def test_a_child_that_wakes_up_in_time_lives(ring: Ring) -> None:
    for _ in range(5):
        ring.set("detokenizer 0", FROZEN)
        ring.run(TIMEOUT_S - 1)
        ring.set("detokenizer 0", LOADS)  # its thread wakes up before its loop
        ring.run(0.5)
        ring.set("detokenizer 0", SERVES)
        ring.run(0.5)
    assert not ring.killed


def test_a_loop_that_stands_still_is_hung_though_its_process_runs(ring: Ring) -> None:
    ring.set("detokenizer 0", RUNNING)
    ring.run(TIMEOUT_S - 1)
    assert not ring.killed
    ring.run(2)
    assert ring.killed == [("detokenizer 0", TIMEOUT_S + SIGN_S)]


def test_a_step_may_take_longer_while_its_process_runs(ring: Ring) -> None:
    ring.set("gpu_worker", RUNNING)
    ring.run(LONG_TURN_TIMES * TIMEOUT_S - 1)
    assert not ring.killed
    ring.run(2)
    assert ring.killed == [("gpu_worker", LONG_TURN_TIMES * TIMEOUT_S + SIGN_S)]


def test_a_child_may_load_for_any_time_and_is_found_if_it_freezes_meanwhile() -> None:
    ring = Ring()
    ring.starts["gpu_worker"], ring.signs["gpu_worker"] = 2, LOADS
    ring.run(10_000)
    assert not ring.killed
    ring.set("gpu_worker", FROZEN)
    ring.run(STARTING_TIMES * TIMEOUT_S - 1)
    assert not ring.killed, "an import may hold up its thread"
    ring.run(2)
    assert ring.killed == [("gpu_worker", STARTING_TIMES * TIMEOUT_S + SIGN_S)]


def test_the_next_start_of_a_killed_child_is_judged_anew(ring: Ring) -> None:
    ring.set("detokenizer 0", FROZEN)
    ring.run(20)
    ring.starts["detokenizer 0"] = 2
    ring.set("detokenizer 0", SERVES)
    ring.run(100)
    assert len(ring.killed) == 1
    ring.set("detokenizer 0", FROZEN)
    ring.run(20)
    assert len(ring.killed) == 2


@pytest.mark.parametrize("settled", [False, True])
def test_a_child_that_never_gave_a_sign(settled: bool) -> None:
    ring = Ring()
    ring.settled = settled
    ring.starts["gpu_worker"], ring.signs["gpu_worker"] = 2, FROZEN
    ring.run(STARTING_TIMES * TIMEOUT_S + 1)
    assert ("gpu_worker" in dict(ring.killed)) == settled


def test_zero_switches_it_off() -> None:
    ring = Ring(timeout_s=0.0)
    ring.set("detokenizer 0", FROZEN)
    ring.run(1000)
    assert not ring.killed


def test_a_child_that_was_told_to_stop_is_left_alone(ring: Ring) -> None:
    del ring.starts["detokenizer 0"]
    ring.hung.on_ended("detokenizer 0")
    ring.run(100)
    assert not ring.killed
