"""Any ids, division into steps and point of resumption give the same text and stop, and one final delta."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from blockyard.shared.messages import FinishReason
from blockyard.shared.token_ids import pack

quick = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def reference(bench: Any, ids: list[int], options: dict[str, Any]) -> tuple[str, str | None]:
    """Decodes all ids at once, then cuts at the first complete stop string."""
    text = bench.tokenizer.decode(ids, skip_special_tokens=options["skip_special_tokens"])
    hits = [(text.find(s) + len(s), text.find(s), s) for s in options["stop"] if s in text]
    if not hits:
        return text, None
    end, start, stop = min(hits)
    return text[: end if options["include_stop"] else start], stop


def cuts(draw: Callable[[st.SearchStrategy[Any]], Any], total: int) -> list[int]:
    return sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=5))})


@st.composite
def runs(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[list[int], list[int], int, dict[str, Any]]:
    numbers = draw(st.lists(st.integers(0, 405), max_size=20))
    options = {
        "stop": draw(st.lists(st.sampled_from(["e", "th", " o", "one", "é", "\ufffd", "<s>", "<|im"]), max_size=3)),
        "include_stop": draw(st.booleans()),
        "skip_special_tokens": draw(st.booleans()),
    }
    return numbers, cuts(draw, len(numbers)), draw(st.integers(0, 5)), options


@pytest.mark.parametrize("family", ["byte_tokenizer", "sentence_tokenizer"])
@quick
@given(run=runs())
def test_any_cut_and_any_resume_point_give_the_whole_text(
    family: str,
    request: pytest.FixtureRequest,
    bench_of: Callable[[Tokenizer], Any],
    run: tuple[list[int], list[int], int, dict[str, Any]],
) -> None:
    numbers, bounds, resume_at, options = run
    tokenizer: Tokenizer = request.getfixturevalue(family)
    bench = bench_of(tokenizer)
    usable = [i for i in range(tokenizer.get_vocab_size()) if not str(tokenizer.id_to_token(i)).startswith("<0x")]
    ids = [usable[n % len(usable)] for n in numbers]
    bench.open(**options)
    attempt = 1
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        if n == resume_at and not any(d.finish is not None for d in bench.deltas):
            attempt = 2  # another detokenizer takes over with the ids that the gateway has
            bench.restart()
            delivered = len(bench.text)
            bench.open(attempt=2, output_ids=pack(bench.token_ids), chars_sent=delivered, **options)
        bench.step(start, ids[start:end], attempt=attempt)
    bench.step(len(ids), [], attempt=attempt, finish=FinishReason.LENGTH)
    text, stop = reference(bench, ids, options)
    finals = [d for d in bench.deltas if d.finish is not None]
    assert bench.text == text
    assert len(finals) == 1 and finals[0] is bench.deltas[-1]
    assert finals[0].stop_reason == stop
    assert finals[0].finish is (FinishReason.LENGTH if stop is None else FinishReason.STOP)
    assert bench.token_ids == ids[: len(bench.token_ids)]
    if stop is None:
        assert bench.token_ids == ids
    position = 0
    for delta in bench.deltas:
        assert delta.first == position
        position += len(delta.token_ids)
    assert bench.streams.num_open == 0
