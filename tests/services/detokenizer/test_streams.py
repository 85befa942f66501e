"""Streams: text, stop strings, attempts, resumption, and exactly one final delta."""

from typing import Any

import pytest

from blockyard.shared.messages import (
    Cancel,
    FinishReason,
    StreamOpen,
    StreamRef,
    TextOptions,
    TokenBatch,
    TokenLogprobs,
    TokenStep,
)
from blockyard.shared.token_ids import pack

SCHEDULER, GATEWAY = 77, 99  # as in conftest


def test_a_stream_shows_the_special_tokens_of_a_format(bench) -> None:
    ids = [*bench.ids("a"), bench.tokenizer.token_to_id("<|im_start|>"), bench.tokenizer.token_to_id("<s>")]
    bench.open(shown_special=["<|im_start|>"])
    bench.step(0, ids)
    assert bench.text == "a<|im_start|>"


def test_one_delta_a_step_with_its_ids(bench: Any) -> None:
    ids = bench.ids("The quick 🎉 fox")
    bench.open()
    for n, token_id in enumerate(ids):
        bench.step(n, [token_id])
    bench.step(len(ids), [], finish=FinishReason.LENGTH)
    assert bench.text == "The quick 🎉 fox"
    assert [d.token_ids for d in bench.deltas] == [[i] for i in ids] + [[]]
    assert [d.first for d in bench.deltas] == [*range(len(ids)), len(ids)]
    assert [d.finish for d in bench.deltas if d.finish is not None] == [FinishReason.LENGTH]
    assert bench.streams.num_open == 0 and bench.stops == []
    assert bench.streams.tokens_total == len(ids)


@pytest.mark.parametrize("stop_token", [None, 3])
def test_the_id_that_ended_it_is_counted_but_not_shown(bench: Any, stop_token: int | None) -> None:
    ids = bench.ids("The fox")
    end = bench.tokenizer.token_to_id("</s>") if stop_token is None else bench.ids("dog")[0]
    bench.open(skip_special_tokens=False)
    bench.step(0, [*ids, end], finish=FinishReason.STOP, stop_token=stop_token)
    (delta,) = bench.deltas
    assert (delta.text, delta.token_ids) == ("The fox", [*ids, end])
    assert (delta.finish, delta.stop_reason) == (FinishReason.STOP, stop_token)


@pytest.mark.parametrize("stop", [[], ["dog "]])
def test_the_id_that_ended_it_is_shown_with_include_stop(bench: Any, stop: list[str]) -> None:
    ids, (end, *_) = bench.ids("The fox"), bench.ids("dog")
    bench.open(include_stop=True, stop=stop)
    for n, token_id in enumerate(ids):
        bench.step(n, [token_id])
    bench.step(len(ids), [end], finish=FinishReason.STOP, stop_token=end)
    assert bench.text == "The fox" + bench.tokenizer.decode([end])
    assert (bench.token_ids, bench.deltas[-1].stop_reason, bench.stops) == ([*ids, end], end, [])


@pytest.mark.parametrize(("skips", "text"), [(True, "The fox"), (False, "The fox</s>")])
def test_end_of_sequence_with_include_stop_is_a_special_token(bench: Any, skips: bool, text: str) -> None:
    bench.open(include_stop=True, skip_special_tokens=skips)
    bench.step(0, [*bench.ids("The fox"), bench.tokenizer.token_to_id("</s>")], finish=FinishReason.STOP)
    assert (bench.text, bench.deltas[-1].stop_reason) == (text, None)


def test_unfinished_bytes_come_out_at_the_end(bench: Any) -> None:
    first = bench.tokenizer.token_to_id("Ã")
    bench.open()
    bench.step(0, [first])
    assert (bench.deltas[0].text, bench.deltas[0].token_ids) == ("", [first])
    bench.step(1, [], finish=FinishReason.LENGTH)
    assert bench.text == "\ufffd"


@pytest.mark.parametrize(("include", "text"), [(False, "The quick "), (True, "The quick brown")])
def test_stop_string_across_tokens(bench: Any, include: bool, text: str) -> None:
    ids = bench.ids("The quick brown fox")
    bench.open(stop=["zzz", "brown"], include_stop=include)
    for n, token_id in enumerate(ids):
        bench.step(n, [token_id])  # the scheduler does not know yet
    assert bench.text == text
    last = bench.deltas[-1]
    assert (last.finish, last.stop_reason) == (FinishReason.STOP, "brown")
    assert bench.stops == [StreamRef("r", 1, 0)]
    assert bench.tokenizer.decode(bench.token_ids) in ("The quick brown", "The quick brown ")
    assert bench.streams.num_open == 0


def test_stop_string_cuts_the_ids_of_its_step(bench: Any) -> None:
    ids, rest = bench.ids("one two"), bench.ids(" three four")
    logprobs = [TokenLogprobs(i, -1.0, 1, [], []) for i in ids + rest]
    bench.open(stop=["two"])
    bench.step(0, ids + rest, logprobs=logprobs)
    (delta,) = bench.deltas
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("one ", ids, "two")
    assert [entry.token_id for entry in delta.logprobs] == ids


def test_a_stop_string_replaces_the_workers_finish_without_a_stop_frame(bench: Any) -> None:
    bench.open(stop=["two"])
    bench.step(0, bench.ids("one two"), finish=FinishReason.LENGTH)
    assert (bench.deltas[0].finish, bench.deltas[0].stop_reason, bench.stops) == (FinishReason.STOP, "two", [])


def test_stop_string_before_the_end_of_sequence(bench: Any) -> None:
    ids = bench.ids("one two")
    bench.open(stop=["two"])
    bench.step(0, [*ids, bench.tokenizer.token_to_id("</s>")], finish=FinishReason.STOP)
    (delta,) = bench.deltas
    assert (delta.text, delta.token_ids, delta.stop_reason, delta.first) == ("one ", ids, "two", 0)


def test_held_back_text_is_delivered_at_the_end(bench: Any) -> None:
    ids = bench.ids("The fox")
    bench.open(stop=["fox jumps"])
    bench.step(0, ids)
    assert bench.text == "The "
    bench.step(len(ids), [], finish=FinishReason.LENGTH)
    assert (bench.text, bench.deltas[-1].finish) == ("The fox", FinishReason.LENGTH)


def test_stop_strings_wait_for_min_tokens(bench: Any) -> None:
    ids = bench.ids("one two one two")
    word = len(bench.ids("one two"))
    bench.open(stop=["two"], min_tokens=word)
    bench.step(0, ids)
    assert (bench.text, bench.deltas[-1].stop_reason) == ("one two one ", "two")
    bench.open("s", stop=["two"], min_tokens=word - 1)
    bench.step(0, ids, "s")
    assert bench.deltas[-1].text == "one "


def test_overlaps_are_cut_and_gaps_dropped(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    ids = bench.ids("one two three four")
    bench.open()
    bench.step(0, ids[:2])
    bench.step(0, ids[:2])  # a duplicate gives no delta
    bench.step(1, ids[1:3], logprobs=[TokenLogprobs(i, -1.0, 1, [], []) for i in ids[1:3]])
    assert bench.token_ids == ids[:3]
    assert [entry.token_id for entry in bench.deltas[-1].logprobs] == ids[2:3]
    bench.step(4, ids[4:])
    bench.step(5, ids[5:])
    assert bench.token_ids == ids[:3]
    assert len(caplog.records) == 1
    bench.step(3, ids[3:], finish=FinishReason.LENGTH)
    assert (bench.token_ids, bench.text) == (ids, "one two three four")


def test_the_highest_attempt_wins(bench: Any) -> None:
    ids = bench.ids("one two")
    bench.open(attempt=2)
    bench.open(attempt=1)
    bench.step(0, ids, attempt=1)
    bench.step(0, ids, attempt=3)  # not opened yet
    assert bench.deltas == []
    bench.step(0, ids, attempt=2)
    bench.open(attempt=2)  # a duplicate does not reset the stream
    assert bench.streams.apply(SCHEDULER, TokenBatch([], [TokenStep("r", 2, 0, 0, ids)])).deltas == {}
    bench.open(attempt=3, gateway=100)
    bench.step(len(ids), ids, attempt=2)
    bench.step(0, ids, attempt=3)
    assert [d.attempt for d in bench.deltas] == [2, 3]
    assert bench.streams.num_open == 1


def test_close_drops_up_to_its_attempt(bench: Any) -> None:
    for choice in range(3):
        bench.open(attempt=2, choice=choice)
    bench.open("other")
    bench.apply(TokenBatch([], [], [Cancel("r", 1), Cancel("nobody", 9)]))
    assert bench.streams.num_open == 4
    bench.apply(TokenBatch([], [], [Cancel("r", 2), Cancel("other", 7)]))
    assert bench.streams.num_open == 0
    bench.step(0, [5], attempt=2)
    assert bench.deltas == []


@pytest.mark.parametrize("gone", [GATEWAY, SCHEDULER])
def test_streams_of_a_lost_peer_are_dropped(bench: Any, gone: int) -> None:
    bench.open("a")
    bench.open("b", gateway=5)
    bench.streams.apply(6, TokenBatch([StreamOpen("c", 1, 0, GATEWAY, b"", b"", 0, TextOptions())], []))
    bench.streams.drop_peer(gone)
    assert bench.streams.num_open == 1


def test_an_unknown_id_fails_its_stream_only(bench: Any) -> None:
    ids = bench.ids("one")
    bench.open("bad")
    bench.open("good")
    bench.apply(TokenBatch([], [TokenStep("bad", 1, 0, 0, [*ids, 10**6, ids[0]]), TokenStep("good", 1, 0, 0, ids)]))
    bad, good = bench.deltas
    assert (bad.finish, bad.token_ids, bad.text) == (FinishReason.FAILED, ids, "one")
    assert "1000000" in bad.detail
    assert (good.text, good.finish) == ("one", None)
    assert bench.stops == [StreamRef("bad", 1, 0)]


def test_a_failure_of_the_worker_is_passed_on(bench: Any) -> None:
    bench.open()
    bench.step(0, [], finish=FinishReason.FAILED, detail="out of memory", status=400)
    delta = bench.deltas[0]
    assert (delta.finish, delta.detail, delta.status) == (FinishReason.FAILED, "out of memory", 400)


def test_logprobs_have_bytes(bench: Any) -> None:
    token = bench.tokenizer.token_to_id("Ã")
    entry = TokenLogprobs(token, -0.5, 2, [0, token], [-0.1, -0.5])
    bench.open()
    bench.open("ids", tokens_as_ids=True)
    for name in ("r", "ids"):
        bench.step(0, [token], name, logprobs=[entry], first_prompt=4, prompt_logprobs=[entry], cached_tokens=8)
    plain, by_id = bench.deltas
    assert (plain.logprobs[0].token, plain.logprobs[0].top_tokens) == (b"\xc3", [b"<s>", b"\xc3"])
    assert plain.prompt_logprobs == plain.logprobs
    assert (plain.first_prompt, plain.cached_tokens) == (4, 8)
    assert (by_id.logprobs[0].token, by_id.logprobs[0].top_tokens[0]) == (b"token_id:%d" % token, b"token_id:0")
    bench.step(1, [0], logprobs=[TokenLogprobs(0, -1.0, 1, [10**6], [-1.0])])
    assert bench.deltas[-1].finish is FinishReason.FAILED


def test_a_stop_string_in_delivered_text_ends_the_stream_at_once(bench: Any) -> None:
    """Correct peers never send this, but the stream must not hang."""
    ids = bench.ids("one two three")
    bench.open(attempt=2, stop=["two"], output_ids=pack(ids), chars_sent=2)
    (delta,) = bench.deltas
    assert (delta.text, delta.token_ids, delta.finish) == ("e ", [], FinishReason.STOP)
    assert delta.first == len(bench.ids("one two"))
