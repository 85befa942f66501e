"""Sliding windows: blocks that sequences hold, limits of admission, hits of the prefix cache."""

import pytest

from blockyard.services.scheduler.kv_cache.sliding_window import SlidingWindow, max_len
from blockyard.services.scheduler.sequences.requests import NEVER

from ..conftest import Ring


def test_which_blocks_are_in_the_window() -> None:
    window = SlidingWindow(10, 4, 8)
    assert [window.num_skipped_blocks(n) for n in (0, 9, 12, 13, 16, 17, 100)] == [0, 0, 0, 1, 1, 2, 22]
    assert SlidingWindow(1, 4, 8).num_skipped_blocks(8) == 2, "a token that sees itself alone"


def test_how_many_blocks_are_taken_and_fit() -> None:
    window = SlidingWindow(10, 4, 8)
    assert (window.initial_tokens(100, 0), window.initial_tokens(12, 0), window.initial_tokens(100, 40)) == (18, 12, 58)
    assert (max_len(10, 4, 5), max_len(10, 4, 4), max_len(None, 4, 5)) == (NEVER, 16, 20)


@pytest.mark.parametrize(
    ("there", "best"),
    [("", (0, 0)), ("012345", (6, 3)), ("345", (6, 3)), ("45", (0, 0)), ("012", (3, 0)), ("01 345", (6, 3))],
)
def test_a_window_of_a_chain_is_a_hit(there: str, best: tuple[int, int]) -> None:
    """Blocks of 4 tokens, and the next token sees 9 tokens before it: 3 blocks."""
    names = [str(i).encode() for i in range(6)]
    assert SlidingWindow(10, 4, 8).longest_hit(names, lambda name: name.decode() in there) == best


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


def test_without_a_window_long_prompts_are_refused(ring: type[Ring]) -> None:
    it = ring(num_blocks=24, max_model_len=120)
    it.submit("long", 0, prompt=list(range(100)), max_tokens=10)
    assert it.journal("long").refused is not None
