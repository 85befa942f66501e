"""The end of an answer that repeats itself: the finder against a plain loop, and in streams."""

import random
from typing import Any

import pytest

from blockyard.services.detokenizer.repetition import RepetitionFinder
from blockyard.shared.messages import FinishReason, RepetitionDetection


@pytest.mark.parametrize(
    ("asked", "at"),
    [
        (RepetitionDetection(2, 1, 3), 11),  # cd cd cd
        (RepetitionDetection(1, 1, 2), 6),
        (RepetitionDetection(3, 3, 2), 5),  # abc abc
        (RepetitionDetection(2, 1, 4), 13),
        (RepetitionDetection(2, 1, 5), None),
    ],
)
def test_a_repetition_is_found_with_its_last_token(asked: RepetitionDetection, at: int | None) -> None:
    finder = RepetitionFinder(asked)
    found = [finder.push(token) for token in b"abcabccdcdcdcd"[:14]]
    # a b c a b c c d c d c d c d
    assert (found.index(True) if True in found else None) == at


def test_repetitions_are_those_that_a_plain_loop_finds() -> None:
    draw = random.Random(5)
    for _ in range(300):
        smallest = draw.randint(1, 4)
        asked = RepetitionDetection(draw.randint(smallest, 6), smallest, draw.randint(2, 4))
        finder, ids = RepetitionFinder(asked), list[int]()
        for _ in range(60):
            ids.append(draw.randint(0, 1))
            sizes = range(asked.min_pattern_size, asked.max_pattern_size + 1)
            copies = [(ids[-size:] * asked.min_count, ids[-size * asked.min_count :]) for size in sizes]
            assert finder.push(ids[-1]) == any(wanted == there for wanted, there in copies)


def test_a_stream_ends_at_a_repetition(bench: Any) -> None:
    ids = bench.ids("The quick fox fox fox fox")
    again = ids.index(bench.ids("The fox fox")[-1])
    bench.open(repetition=RepetitionDetection(4, 1, 3))
    for n, token_id in enumerate(ids):
        bench.step(n, [token_id])
    last = bench.deltas[-1]
    assert (last.finish, last.stop_reason) == (FinishReason.REPETITION, "repetition_detected")
    assert len(bench.token_ids) == again + 3 < len(ids) and bench.text == bench.tokenizer.decode(bench.token_ids)
    assert bench.streams.num_open == 0 and len(bench.stops) == 1


@pytest.mark.parametrize(
    ("finish", "reason"), [(FinishReason.LENGTH, FinishReason.LENGTH), (None, FinishReason.REPETITION)]
)
def test_the_limit_of_tokens_comes_before_a_repetition_with_the_last_one(
    bench: Any, finish: FinishReason | None, reason: FinishReason
) -> None:
    [token] = {*bench.ids("fox fox")[-1:]}
    bench.open(repetition=RepetitionDetection(1, 1, 3))
    bench.step(0, [token] * 3, finish=finish)
    assert bench.deltas[-1].finish == reason and len(bench.token_ids) == 3


def test_repetitions_do_not_count_before_min_tokens_and_after_a_resumption_they_go_on(bench: Any) -> None:
    [token] = {*bench.ids("fox fox")[-1:]}
    bench.open(repetition=RepetitionDetection(1, 1, 2), min_tokens=5)
    bench.step(0, [token] * 4)
    assert bench.deltas[-1].finish is None
    bench.step(4, [token])
    assert bench.deltas[-1].finish is None
    bench.step(5, [token])
    assert bench.deltas[-1].finish == FinishReason.REPETITION and len(bench.token_ids) == 6
