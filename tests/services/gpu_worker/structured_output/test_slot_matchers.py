"""Slots are opened in a turn without a thread where their grammar is compiled, a few in each turn."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from fake_grammar_engine import FakeCompiled, FakeEngine, constraint

from blockyard.services.gpu_worker.structured_output import slot_matchers
from blockyard.services.gpu_worker.structured_output.mask_memory import MaskMemory
from blockyard.services.gpu_worker.structured_output.matcher_frames import (
    FirstMask,
    FromMatcher,
    OutputRules,
    SlotClose,
    SlotFailed,
    SlotOpen,
)
from blockyard.services.gpu_worker.structured_output.reasoning_ends import EndsByText
from blockyard.services.gpu_worker.structured_output.slot_matchers import SlotMatchers
from blockyard.shared.grammars.interface import MatcherError
from blockyard.shared.messages import OutputConstraint

VOCAB, EOS, NUM_SLOTS, NUM_PROMPT = 40, [1, 39], 16, 3
GRAMMAR = constraint(choices=[[5, 6], [5, 7, 8]])


class Bench:
    def __init__(self) -> None:
        self.memory, self.answers = MaskMemory.create(NUM_SLOTS, VOCAB), list[FromMatcher]()
        self.engine = FakeEngine(VOCAB, EOS)
        self.matchers = SlotMatchers(
            self.engine, self.memory, EOS, self.answers.append, lambda: None, EndsByText(list, 0)
        )

    def open(self, slot: int, owner: int, constrained: OutputConstraint = GRAMMAR, output_ids: bytes = b"") -> None:
        rules = OutputRules(constrained, [], 0, False, [])
        self.matchers.open(SlotOpen(slot, owner, NUM_PROMPT, output_ids, rules))

    def has_first_mask(self, slot: int, owner: int) -> bool:
        return self.memory.has_mask(slot, owner, NUM_PROMPT)

    def turn_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            self.matchers.turn()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """With a grammar that is compiled."""
    made = Bench()
    made.open(0, 1)
    assert not made.matchers.have_opened, "a thread compiles it"
    made.turn_until(lambda: made.has_first_mask(0, 1))
    made.answers.clear()
    return made


def test_a_turn_opens_a_few_slots_of_a_compiled_grammar(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ThreadPoolExecutor, "submit", None)
    monkeypatch.setattr(slot_matchers, "MOST_OPENED", 3)
    for slot in range(1, 6):
        bench.open(slot, slot + 1)
    there = []
    for _ in range(2):
        assert bench.matchers.have_opened
        bench.matchers.turn()
        there.append([slot for slot in range(1, 6) if bench.has_first_mask(slot, slot + 1)])
    assert there == [[1, 2, 3], [1, 2, 3, 4, 5]] and not bench.matchers.have_opened
    assert [one.slot for one in bench.answers if isinstance(one, FirstMask)] == list(range(1, 6))
    assert bench.engine.num_compiled == 1


def test_the_token_of_an_open_slot_is_taken_in_the_turn_that_opens_others(bench: Bench) -> None:
    bench.open(1, 2)
    bench.memory.write_token(0, 1, NUM_PROMPT, 5)
    bench.matchers.turn()
    assert bench.memory.has_mask(0, 1, NUM_PROMPT + 1) and bench.has_first_mask(1, 2)
    bench.memory.write_token(1, 2, NUM_PROMPT, 5)
    bench.matchers.turn()
    assert bench.memory.has_mask(1, 2, NUM_PROMPT + 1)


def test_a_slot_that_is_closed_or_opened_again_before_the_turn(bench: Bench) -> None:
    bench.open(1, 2)
    bench.matchers.close(SlotClose(1, 2))
    bench.open(2, 3)
    bench.matchers.close(SlotClose(2, 3))
    bench.open(2, 4)
    bench.matchers.turn()
    assert not bench.has_first_mask(1, 2) and not bench.has_first_mask(2, 3) and bench.has_first_mask(2, 4)


def test_a_slot_with_output_and_a_new_grammar_are_left_to_a_thread(bench: Bench) -> None:
    bench.open(1, 2, output_ids=(5).to_bytes(4, "little"))
    bench.open(2, 3, constraint(choices=[[9]]))
    assert not bench.matchers.have_opened
    bench.turn_until(lambda: bench.memory.has_mask(1, 2, NUM_PROMPT + 1) and bench.has_first_mask(2, 3))


def test_a_slot_that_cannot_be_opened_fails_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.open(1, 2)
    monkeypatch.setattr(FakeCompiled, "matcher", _raise)
    bench.matchers.turn()
    assert bench.answers == [SlotFailed(1, 2, "no matcher")]
    bench.memory.write_token(0, 1, NUM_PROMPT, 5)
    bench.matchers.turn()
    assert bench.memory.has_mask(0, 1, NUM_PROMPT + 1)


def _raise(compiled: FakeCompiled) -> None:
    raise MatcherError("no matcher")
