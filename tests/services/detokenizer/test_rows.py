"""TokenRows identify streams by the scheduler's numbers, and give the same text as TokenStep."""

from typing import Any

import msgspec
import pytest

from blockyard.shared.messages import (
    NO_LOGPROBS,
    Cancel,
    FinishReason,
    StreamRef,
    TokenBatch,
    TokenLogprobs,
    TokenRows,
    TokenStep,
    encode_logprobs,
)
from blockyard.shared.token_ids import pack


def rows(*entries: tuple[int, int, int]) -> TokenRows:
    """Returns TokenRows of (stream, first, token id) entries."""
    streams, firsts, token_ids = map(list, zip(*entries, strict=True))
    return TokenRows(pack(streams), pack(firsts), pack(token_ids))


def test_rows_become_the_text_that_steps_would(bench: Any) -> None:
    ids, others = bench.ids("The quick fox"), bench.ids("Ein 🎉 Fuchs")
    bench.open("a", stream=5)
    bench.open("b", stream=6)
    count = min(len(ids), len(others))
    for n in range(count):
        bench.apply(TokenBatch([], [], rows=[rows((6, n, others[n]), (5, n, ids[n]))]))
    for name, rest in (("a", ids[count:]), ("b", others[count:])):
        bench.step(count, rest, name, finish=FinishReason.LENGTH)
    texts = {name: "".join(d.text for d in bench.deltas if d.request_id == name) for name in "ab"}
    assert texts == {"a": "The quick fox", "b": "Ein 🎉 Fuchs"}
    firsts = [(d.first, d.token_ids) for d in bench.deltas if d.request_id == "a"]
    assert firsts == [(n, [ids[n]]) for n in range(count)] + [(count, ids[count:])]
    assert bench.streams.tokens_total == len(ids) + len(others)
    assert bench.streams.num_open == 0


def test_rows_have_the_log_probabilities_that_steps_would(bench: Any) -> None:
    first, second = bench.ids("ab")
    scores = [TokenLogprobs(token, -0.5, 1, [token, 5], [-0.5, -1.5]) for token in (first, second)]
    bench.open("a", stream=5)
    bench.open("b", stream=6)
    some = msgspec.structs.replace(
        rows((5, 0, first), (6, 0, first)), logprobs=[encode_logprobs(scores[0]), NO_LOGPROBS]
    )
    bench.apply(TokenBatch([], [], rows=[some]))
    bench.apply(TokenBatch([], [TokenStep("b", 1, 0, 1, [second], logprobs=[scores[1]])]))
    a, b, later = bench.deltas
    assert (a.text, [(p.token_id, p.logprob, p.rank) for p in a.logprobs]) == ("a", [(first, -0.5, 1)])
    assert (b.text, b.logprobs) == ("a", [])
    assert [p.token_id for p in later.logprobs] == [second]


def test_malformed_log_probabilities_fail_their_stream_alone(bench: Any) -> None:
    (token,) = bench.ids("a")
    bench.open("a", stream=5)
    bench.open("b", stream=6)
    wrong = msgspec.structs.replace(rows((5, 0, token), (6, 0, token)), logprobs=[msgspec.Raw(b"\x07"), NO_LOGPROBS])
    bench.apply(TokenBatch([], [], rows=[wrong]))
    a, b = bench.deltas
    assert a.finish is FinishReason.FAILED and "log-probabilities" in a.detail
    assert (b.text, b.finish) == ("a", None)


def test_rows_come_before_the_steps_of_their_batch(bench: Any) -> None:
    first, second = bench.ids("ab")
    bench.open(stream=1)
    bench.apply(TokenBatch([], [TokenStep("r", 1, 0, 1, [second], FinishReason.LENGTH)], rows=[rows((1, 0, first))]))
    assert [d.token_ids for d in bench.deltas] == [[first], [second]]
    assert bench.deltas[-1].finish is FinishReason.LENGTH


def test_a_stop_string_may_end_in_a_row(bench: Any) -> None:
    ids = bench.ids("one two")
    bench.open(stop=["two"], stream=9)
    for n, token_id in enumerate(ids):
        bench.apply(TokenBatch([], [], rows=[rows((9, n, token_id))]))
    assert bench.text == "one "
    assert bench.stops == [StreamRef("r", 1, 0)]
    said = len(bench.deltas)
    bench.apply(TokenBatch([], [], rows=[rows((9, len(ids), ids[0]))]))
    assert len(bench.deltas) == said, "it has ended"


@pytest.mark.parametrize("end", ["close", "peer", "attempt"])
def test_a_number_is_unknown_once_its_stream_is_gone(bench: Any, end: str) -> None:
    token_id = bench.ids("a")[0]
    bench.open(stream=3)
    if end == "close":
        bench.apply(TokenBatch([], [], [Cancel("r", 1)]))
    elif end == "peer":
        bench.streams.drop_peer(77)
    else:
        bench.open(attempt=2, stream=4)
    bench.apply(TokenBatch([], [], rows=[rows((3, 0, token_id))]))
    assert not bench.deltas
    if end == "attempt":
        bench.apply(TokenBatch([], [], rows=[rows((4, 0, token_id))]))
        assert [d.attempt for d in bench.deltas] == [2]


def test_each_scheduler_has_numbers_of_its_own(bench: Any) -> None:
    token_id = bench.ids("a")[0]
    bench.open("a", stream=3)
    bench.apply(TokenBatch([], [], rows=[rows((3, 0, token_id))]), scheduler=78)
    assert not bench.deltas


def test_a_stream_without_a_number_is_in_no_row(bench: Any) -> None:
    token_id = bench.ids("a")[0]
    bench.open()
    bench.apply(TokenBatch([], [], rows=[rows((0, 0, token_id), (1, 0, token_id))]))
    assert not bench.deltas


@pytest.mark.parametrize(("first", "said"), [(0, 0), (1, 1), (2, 0)])
def test_a_repeated_token_and_a_token_after_a_gap_are_dropped(bench: Any, first: int, said: int) -> None:
    token_id = bench.ids("a")[0]
    bench.open(stream=1)
    bench.step(0, [token_id])
    bench.apply(TokenBatch([], [], rows=[rows((1, first, token_id))]))
    assert len(bench.deltas) == 1 + said
