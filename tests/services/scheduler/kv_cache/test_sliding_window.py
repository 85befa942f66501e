"""Sliding windows: what sequences hold, what admission counts, what is a hit."""

import pytest

from blockyard.services.scheduler.kv_cache.sliding_window import Window
from blockyard.services.scheduler.sequences.requests import NEVER

from ..conftest import Ring


def test_which_blocks_are_seen() -> None:
    window = Window(10, 4, 8)
    assert [window.first_seen(n) for n in (0, 9, 12, 13, 16, 17, 100)] == [0, 0, 0, 1, 1, 2, 22]
    assert Window(None, 4, 8).first_seen(100) == 0
    assert Window(1, 4, 8).first_seen(8) == 2, "a token that sees itself alone"


def test_how_much_is_taken_and_fits() -> None:
    window = Window(10, 4, 8)
    assert (window.at_first(100, 0), window.at_first(12, 0), window.at_first(100, 40)) == (18, 12, 58)
    assert (window.longest(5), window.longest(4)) == (NEVER, 16)
    assert Window(None, 4, 8).longest(5) == 20


@pytest.mark.parametrize(
    ("there", "best"),
    [("", (0, 0)), ("012345", (6, 3)), ("345", (6, 3)), ("45", (0, 0)), ("012", (3, 0)), ("01 345", (6, 3))],
)
def test_a_window_of_a_chain_is_a_hit(there: str, best: tuple[int, int]) -> None:
    """Blocks of 4 tokens, of which the next token sees 9 before it: 3 blocks."""
    names = [str(i).encode() for i in range(6)]
    assert Window(10, 4, 8).best(names, lambda name: name.decode() in there) == best


def test_many_long_sequences_run_where_one_would_not_fit(ring: type[Ring]) -> None:
    it = ring(window=8, num_blocks=24, max_model_len=120, max_num_batched_tokens=8)
    for i in range(4):
        it.submit(str(i), 0, prompt=[7 * i + p for p in range(60)], max_tokens=50)
    most = 0
    while it.worker.busy():
        it.steps(1)
        most = max(most, it.world.core.stats().running)
    it.finish()
    assert most >= 3
    assert it.world.core.stats().preemptions_total == 0
    assert it.world.core.card.max_model_len == 120


def test_without_a_window_they_are_refused(ring: type[Ring]) -> None:
    it = ring(num_blocks=24, max_model_len=120)
    it.submit("long", 0, prompt=list(range(100)), max_tokens=10)
    assert it.journal("long").refused is not None
