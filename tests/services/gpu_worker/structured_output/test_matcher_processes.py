"""Real matcher processes with a fake engine: masks, failures, kills of either side."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import fake_grammar_engine
import msgspec
import numpy as np
import pytest
from fake_grammar_engine import allowed_ids, constraint

from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.gpu_worker.structured_output import matcher_processes
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherKey, MatcherProcesses
from blockyard.shared.messages import (
    Grammar,
    GrammarEngine,
    OutputConstraint,
    Sampling,
    SlotStart,
    Stats,
)

VOCAB, EOS = 40, [1, 39]
GUIDANCE, XGRAMMAR = GrammarEngine.GUIDANCE, GrammarEngine.XGRAMMAR
PROMPT = [2, 3, 4]


class Bench:
    """Slots with tokens, and the processes that make their masks."""

    def __init__(self, num_slots: int = 8, path: str = "unused", device_samples: bool = False) -> None:
        command = fake_grammar_engine.COMMAND
        self.matchers = MatcherProcesses(path, VOCAB, EOS, command)
        self.reset(num_slots if not device_samples else 0)
        if device_samples:
            self.matchers.share_memory(num_slots)
            self.reset(num_slots)

    def reset(self, num_slots: int) -> None:
        self.table = Slots(num_slots, max_model_len=64, block_size=16, vocab_size=VOCAB, num_blocks=100)
        self.matchers.reset(self.table)

    def start(self, slot: int, constrained: OutputConstraint, outputs: list[int] | None = None, **more: object) -> None:
        sampling = Sampling(max_tokens=40, constraint=constrained, **more)  # type: ignore[arg-type]
        ids = np.array([*PROMPT, *(outputs or [])], "<u4").tobytes()
        self.matchers.end(slot)
        begun = SlotStart(slot, ids, len(PROMPT), 0, [1, 2, 3], sampling, 0)
        assert self.table.start(begun)
        self.matchers.start(begun)

    def mask(self, slot: int, wait_s: float = 20.0) -> list[int] | str:
        """The mask of the next token, or the reason that there is none."""
        index = int(self.table.num_tokens[slot])
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            self.matchers.wait({slot: index}, has_others=False)
            if problem := self.matchers.problem(slot):
                return problem.cause
            if (words := self.matchers.mask(slot, index)) is not None:
                return allowed_ids(words)
        raise TimeoutError(f"slot {slot} has no mask")

    def status(self, slot: int) -> int:
        problem = self.matchers.problem(slot)
        assert problem is not None
        return problem.status

    def sample(self, slot: int, token: int) -> None:
        self.matchers.sampled([(slot, int(self.table.num_tokens[slot]), token)])
        self.table.append(np.array([slot]), np.array([token]))

    def masks(self, slot: int, output: list[int]) -> list[list[int] | str]:
        found = []
        for token in output:
            found.append(self.mask(slot))
            self.sample(slot, token)
        return [*found, self.mask(slot)]


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    with contextlib.closing(made.matchers):
        yield made


def until(condition: Callable[[], bool], wait_s: float = 10.0) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_process_starts_without_a_constrained_slot(bench: Bench) -> None:
    bench.matchers.end(3)
    assert bench.matchers.count(Stats(steps_total=1)) == Stats(steps_total=1)
    assert bench.matchers.process_ids == {}


def test_masks_of_a_slot_until_its_grammar_is_complete(bench: Bench) -> None:
    bench.start(5, constraint(choices=[[5, 6], [5, 7, 8]]))
    assert bench.masks(5, [5, 7, 8]) == [[5], [6, 7], [8], EOS]
    stats = bench.matchers.count(Stats())
    assert (stats.masks_total, sum(stats.first_mask_counts), stats.matcher_restarts_total) == (4, 1, 0)
    assert stats.first_mask_us_total > 0


def test_a_slot_starts_behind_the_output_it_has(bench: Bench) -> None:
    bench.start(5, constraint(choices=[[5, 6], [5, 7, 8]], begin_after=[9]), outputs=[3, 9, 5])
    assert bench.mask(5) == [6, 7]
    bench.start(5, constraint(choices=[[10]]))  # another owner of the same slot
    assert bench.mask(5) == [10]


def test_tokens_that_a_device_writes_are_found_without_a_message() -> None:
    it = Bench(device_samples=True)
    with contextlib.closing(it.matchers):
        it.start(5, constraint(choices=[[5, 6], [5, 7, 8]]))
        for token, following in ((5, [6, 7]), (7, [8]), (8, EOS)):
            index = int(it.table.num_tokens[5])
            assert it.mask(5) != following
            it.matchers.memory.write_token(5, it.matchers.owner_of(5), index, token)
            it.table.append(np.array([5]), np.array([token]))
            assert it.mask(5) == following


def test_many_slots_of_two_engines_side_by_side(bench: Bench) -> None:
    bench.reset(64)
    for slot in range(64):
        one = constraint(choices=[[slot % 30 + 2, 3, slot % 20 + 4]])
        grammar = one.grammar
        assert grammar is not None
        bench.start(slot, OutputConstraint(grammar_with(grammar, (GUIDANCE, XGRAMMAR)[slot % 2])))
    for place in range(3):
        for slot in range(64):
            token = (slot % 30 + 2, 3, slot % 20 + 4)[place]
            assert bench.mask(slot) == [token]
            bench.sample(slot, token)
    assert bench.matchers.process_ids.keys() == {(GUIDANCE, 0), (XGRAMMAR, 0)}


@pytest.mark.parametrize(("cores", "num"), [(1, 1), (4, 1), (8, 3), (16, 7), (18, 8), (128, 8)])
def test_the_number_of_processes_leaves_cores_for_others(cores: int, num: int) -> None:
    assert matcher_processes.num_processes(cores) == num


def test_slots_are_spread_over_the_processes_of_an_engine(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their numbers are; a slot that starts again stays where it was, if no process has fewer."""
    bench.reset(64)
    monkeypatch.setattr(bench.matchers, "_num_processes", 2)
    for slot in range(1, 16, 2):
        bench.start(slot, constraint(choices=[[5, 6], [5, 7, 8]]))
    processes = {slot: state.process.number for slot, state in bench.matchers._slots.items()}
    assert sorted(processes.values()) == [0] * 4 + [1] * 4
    for slot in processes:
        bench.start(slot, constraint(choices=[[9]]))
    assert {slot: state.process.number for slot, state in bench.matchers._slots.items()} == processes
    for slot, number in processes.items():
        if number == 1:
            bench.matchers.end(slot)
    for slot in range(2, 6, 2):
        bench.start(slot, constraint(choices=[[9]]))
    assert [bench.matchers._slots[slot].process.number for slot in (2, 4)] == [1, 1]
    assert all(bench.mask(slot) == [9] for slot in bench.matchers._slots)


def grammar_with(grammar: Grammar, engine: GrammarEngine) -> Grammar:
    return msgspec.structs.replace(grammar, engine=engine)


def test_a_slot_that_changes_its_engine_waits_for_the_process_before(bench: Bench) -> None:
    """The process of the first engine works on a mask of this slot while the next owner starts."""
    bench.start(5, constraint(choices=[[5, 6]], mask_s=0.3))
    until(lambda: bench.matchers.memory.working[5] != 0)
    time.sleep(0.1)
    later = constraint(choices=[[8]])
    assert later.grammar is not None
    bench.start(5, OutputConstraint(grammar_with(later.grammar, XGRAMMAR)))
    assert bench.mask(5) == [8]
    time.sleep(0.3)
    assert bench.mask(5) == [8]


def test_a_slow_compilation_holds_up_no_other_slot(bench: Bench) -> None:
    bench.start(1, constraint(choices=[[5]], compile_s=4.0))
    bench.start(2, constraint(modulus=2, length=20))
    assert bench.mask(2)[:3] == [0, 2, 4]
    for place in range(19):
        bench.sample(2, 2 + place % 2)
        bench.mask(2)
    began = time.monotonic()
    bench.matchers.wait({1: 3, 2: 22}, has_others=True)  # slot 1 has had no mask yet: the step does not wait
    assert bench.matchers.num_waits >= 1
    assert time.monotonic() - began < 0.9
    assert bench.matchers.mask(1, 3) is None
    assert bench.mask(1) == [5]


@pytest.mark.parametrize(
    ("fields", "outputs", "expected"),
    [
        ({"choices": [[5, 6, 7]], "fails_at": 2}, [5, 6], "the fake grammar fails here, at output token 3"),
        ({"choices": [[5, 6]], "error": "not a grammar"}, [], "not a grammar"),
    ],
)
def test_a_grammar_that_fails_has_a_reason(
    bench: Bench, fields: dict[str, object], outputs: list[int], expected: str
) -> None:
    bench.start(2, constraint(modulus=2, length=9))
    bench.start(1, constraint(**fields))
    assert bench.masks(1, outputs)[-1] == expected
    assert bench.mask(2)[:2] == [0, 2], "other slots go on"


def test_an_engine_that_cannot_be_loaded_fails_its_slots() -> None:
    it = Bench(path="broken: no such library")
    with contextlib.closing(it.matchers):
        it.start(1, constraint(choices=[[5]]))
        assert it.mask(1) == "guidance: broken: no such library"
        assert it.status(1) == 500


def test_a_killed_process_is_started_again_with_the_tokens_so_far(bench: Bench) -> None:
    bench.start(5, constraint(begin_after=[9], modulus=3, length=6), outputs=[4])
    output = [9, 0, 4, 2, 3, 7, 5]  # 1 ends a sequence
    for place, token in enumerate(output):
        if place in (0, 3, 6):
            os.kill(bench.matchers.process_ids[MatcherKey(GUIDANCE, 0)], signal.SIGKILL)
        mask = bench.mask(5)
        assert mask == [t for t in range(VOCAB) if t not in EOS] if not place else token in mask
        assert place == 0 or all(one % 3 == (place - 1) % 3 for one in mask)
        bench.sample(5, token)
    assert bench.mask(5) == EOS
    assert bench.matchers.count(Stats()).matcher_restarts_total >= 2
    assert len({*bench.matchers.process_ids.values()}) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2])
def test_kills_from_outside_fail_no_slot_however_many_they_are(bench: Bench, number: signal.Signals) -> None:
    """Each comes before the process has made a mask."""
    bench.start(1, constraint(choices=[[5, 6]]))
    killed: set[int] = set()
    while len(killed) < 6:
        pid = bench.matchers.process_ids[MatcherKey(GUIDANCE, 0)]
        if pid not in killed:
            os.kill(pid, number)
            killed.add(pid)
        bench.matchers.wait({1: len(PROMPT)}, has_others=False)
        assert bench.matchers.problem(1) is None
    assert bench.mask(1) == [5]
    bench.sample(1, 5)
    assert bench.mask(1) == [6]


def test_kills_from_outside_without_end_fail_a_slot(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_processes, "KILLED_S", 0.0)
    bench.start(1, constraint(choices=[[5, 6]]))
    while bench.matchers.problem(1) is None:
        os.kill(bench.matchers.process_ids[MatcherKey(GUIDANCE, 0)], signal.SIGKILL)
        bench.matchers.wait({1: len(PROMPT)}, has_others=False)
    assert bench.status(1) == 500
    assert bench.mask(1) == "the process of the grammar engine guidance was killed from outside for 0 s"


def test_a_grammar_that_ends_the_process_twice_at_one_token_fails_alone(bench: Bench) -> None:
    bench.start(1, constraint(choices=[[5, 6, 7]], dies_at=1))
    bench.start(2, constraint(choices=[[5, 6, 7]]))
    assert bench.mask(1) == bench.mask(2) == [5]
    bench.sample(2, 5)
    assert bench.mask(2) == [6]
    bench.sample(1, 5)
    assert bench.mask(1) == "the grammar engine guidance ended while it made a mask, at output token 2"
    assert bench.status(1) == 400
    assert bench.mask(2) == [6]
    bench.sample(2, 6)
    assert bench.mask(2) == [7]


def test_a_mask_that_is_overdue_fails_its_slot(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher_processes, "OVERDUE_S", 0.5)
    bench.start(1, constraint(choices=[[5]]))
    assert bench.mask(1) == [5]
    bench.start(1, constraint(choices=[[5]], compile_s=60.0))
    bench.start(2, constraint(choices=[[6]]))
    assert bench.mask(1) == "the grammar engine guidance took more than 0 s for a mask, at output token 1"
    assert bench.status(1) == 400
    assert bench.mask(2) == [6]


def test_a_reset_ends_all_slots_and_keeps_the_processes(bench: Bench) -> None:
    bench.start(5, constraint(choices=[[5, 6]]))
    assert bench.mask(5) == [5]
    pids = bench.matchers.process_ids
    bench.reset(4)
    bench.start(3, constraint(choices=[[7]]))
    assert bench.mask(3) == [7]
    assert bench.matchers.process_ids == pids
    bench.reset(100)  # more slots than the memory has
    bench.start(99, constraint(choices=[[8]]))
    assert bench.mask(99) == [8]


def test_processes_end_with_the_matchers() -> None:
    it = Bench()
    it.start(5, constraint(choices=[[5, 6]]))
    assert it.mask(5) == [5]
    (pid,) = it.matchers.process_ids.values()
    it.matchers.close()
    until(lambda: not is_running(pid))


WORKER = """
import sys, time
sys.path[:0] = {path!r}
from fake_grammar_engine import COMMAND
from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses
from blockyard.shared.messages import GrammarEngine
matchers = MatcherProcesses("unused", 40, [1], COMMAND, [GrammarEngine.GUIDANCE])
matchers.reset(Slots(4, 64, 16, 40, 100))
print(*matchers.process_ids.values(), flush=True)
time.sleep(60)
"""


def test_a_process_ends_when_its_worker_is_killed() -> None:
    path = [entry for entry in sys.path if entry]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", WORKER.format(path=path)], stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        pid = int(worker.stdout.readline())
        assert is_running(pid)
        time.sleep(0.5)
        worker.kill()
        worker.wait()
        until(lambda: not is_running(pid))
