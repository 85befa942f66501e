"""Which children count as hung, without processes and in virtual time."""

import pytest

from blockyard.services.launcher.supervision.hung import STARTING_TIMES, HungDetector
from blockyard.shared.messages import Member, Role

TIMEOUT_S, DEAD_AFTER_S = 10.0, 4.0


class Ring:
    """Two children under a registry; `tick` advances by half a second, as the launcher does."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.hung = HungDetector(timeout_s, DEAD_AFTER_S)
        self.now = 100.0
        self.starts = {"message_bus": 1, "detokenizer 0": 1, "gpu_worker": 1}
        self.registry_heard_s = self.now
        self.registry_speaks = True
        self.settled = True
        self.killed: list[tuple[str, float]] = []
        self.began = self.now

    def member(self, name: str, ready: bool = True, incarnation: int = 0) -> Member:
        return Member(name, Role.DETOKENIZER, incarnation or self.starts[name], "", ready=ready)

    def run(self, seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            self.now += 0.5
            if self.registry_speaks:
                self.registry_heard_s = self.now
            for name, start in self.starts.items():
                self.hung.on_running(name, start, self.now)
            self.hung.on_registry("message_bus", self.registry_heard_s, self.now)
            for name, silent_s in self.hung.find_hung(self.now, self.settled).items():
                self.killed.append((name, self.now - self.began))
                assert silent_s >= TIMEOUT_S

    def lose(self, name: str) -> None:
        self.began = self.now
        self.hung.on_gone(self.member(name), self.now)


@pytest.fixture
def ring() -> Ring:
    ring = Ring()
    ring.run(1)
    for name in ("detokenizer 0", "gpu_worker"):
        ring.hung.on_member(ring.member(name))
    return ring


def test_no_child_with_a_heartbeat_is_killed(ring: Ring) -> None:
    ring.run(1000)
    assert not ring.killed


def test_a_silent_child_is_killed_once_after_the_timeout(ring: Ring) -> None:
    ring.lose("detokenizer 0")
    ring.run(100)
    assert ring.killed == [("detokenizer 0", TIMEOUT_S - DEAD_AFTER_S)]


def test_a_child_whose_heartbeat_returns_in_time_lives(ring: Ring) -> None:
    for _ in range(5):
        ring.lose("detokenizer 0")
        ring.run(5)
        ring.hung.on_member(ring.member("detokenizer 0"))
    ring.run(100)
    assert not ring.killed


def test_the_end_of_an_earlier_incarnation_says_nothing(ring: Ring) -> None:
    ring.starts["detokenizer 0"] = 2
    ring.run(1)
    ring.hung.on_member(ring.member("detokenizer 0"))
    ring.hung.on_gone(ring.member("detokenizer 0", incarnation=1), ring.now)
    ring.run(1000)
    assert not ring.killed


def test_the_next_start_of_a_killed_child_is_judged_anew(ring: Ring) -> None:
    ring.lose("detokenizer 0")
    ring.run(20)
    ring.starts["detokenizer 0"] = 2
    ring.run(1)
    ring.hung.on_member(ring.member("detokenizer 0"))
    ring.run(100)
    assert len(ring.killed) == 1
    ring.lose("detokenizer 0")
    ring.run(20)
    assert len(ring.killed) == 2


def test_a_child_that_is_not_ready_has_longer(ring: Ring) -> None:
    """A worker that loads weights or captures graphs may hold up its heartbeat."""
    ring.hung.on_member(ring.member("gpu_worker", ready=False))
    ring.lose("gpu_worker")
    ring.run(STARTING_TIMES * TIMEOUT_S - DEAD_AFTER_S - 1)
    assert not ring.killed
    ring.run(2)
    assert [name for name, _ in ring.killed] == ["gpu_worker"]


@pytest.mark.parametrize("settled", [False, True])
def test_a_child_that_never_announced_itself(settled: bool) -> None:
    ring = Ring()
    ring.settled = settled
    ring.hung.on_member(ring.member("detokenizer 0"))
    ring.run(STARTING_TIMES * TIMEOUT_S + 1)
    assert ("gpu_worker" in dict(ring.killed)) == settled


def test_a_silent_registry_is_killed_and_no_other_child(ring: Ring) -> None:
    ring.lose("detokenizer 0")
    ring.registry_speaks = False
    ring.run(TIMEOUT_S + 1)
    assert [name for name, _ in ring.killed] == ["message_bus"]
    ring.run(20)
    assert [name for name, _ in ring.killed] == ["message_bus"]
    ring.starts["message_bus"], ring.registry_speaks = 2, True
    ring.run(TIMEOUT_S - 1)
    assert len(ring.killed) == 1  # the detokenizer's silence counts from the registry's return
    ring.run(2)
    assert [name for name, _ in ring.killed] == ["message_bus", "detokenizer 0"]


def test_zero_switches_it_off() -> None:
    ring = Ring(timeout_s=0.0)
    ring.run(1)
    ring.hung.on_member(ring.member("detokenizer 0"))
    ring.lose("detokenizer 0")
    ring.run(1000)
    assert not ring.killed


def test_a_child_that_was_told_to_stop_is_left_alone(ring: Ring) -> None:
    ring.lose("detokenizer 0")
    del ring.starts["detokenizer 0"]
    ring.hung.on_ended("detokenizer 0")
    ring.run(100)
    assert not ring.killed
