"""Metrics compared with cases computed by hand."""

import pytest

from blockyard.services.bench import metrics
from blockyard.services.bench.load.results import RequestResult
from blockyard.shared.errors import ConfigError

# sent at 0: tokens after 100, 120, 160 ms
FIRST = RequestResult(0.0, 0.16, 0.0, [0.1, 0.12, 0.16], asked_output=3, num_input=10, num_output=3)
# sent at 0.05: four tokens in two events after 200 and 260 ms, its end at 300 ms
SECOND = RequestResult(0.05, 0.35, 0.0, [0.25, 0.31], asked_output=5, num_input=20, num_output=4)
# one token, no usage, sent after the end of the others
THIRD = RequestResult(0.4, 0.5, 0.4, [0.5], asked_output=1)
FAILED = RequestResult(0.0, 0.9, 0.0, asked_output=9, failure="HTTP 429: full")
ALL = [FIRST, SECOND, THIRD, FAILED]


def test_a_run_by_hand() -> None:
    s = metrics.summarize(ALL, 2.0, {})
    assert (s.completed, s.failed, s.input_tokens, s.output_tokens, s.asked_output_tokens) == (3, 1, 30, 8, 9)
    assert (s.requests_off_length, s.requests_without_usage, s.peak_running) == (1, 1, 3)
    assert (s.requests_per_s, s.output_tokens_per_s, s.total_tokens_per_s) == (1.5, 4.0, 19.0)
    assert s.tokens_per_event == pytest.approx(8 / 6)
    assert (s.goodput_per_s, s.good_share) == (None, None)
    assert s.ttft_ms is not None and s.ttft_ms.mean == pytest.approx((100 + 200 + 100) / 3)
    assert s.ttft_ms.p50 == pytest.approx(100) and s.ttft_ms.max == pytest.approx(200)
    assert s.tpot_ms is not None  # (160 - 100) / 2 and (300 - 200) / 3; one token has none
    assert (s.tpot_ms.mean, s.tpot_ms.max) == (pytest.approx((30 + 100 / 3) / 2), pytest.approx(100 / 3))
    assert s.itl_ms is not None  # 20, 40 and 60 in one pool
    assert (s.itl_ms.mean, s.itl_ms.p50, s.itl_ms.p90) == (pytest.approx(40), pytest.approx(40), pytest.approx(56))
    assert s.e2el_ms is not None and s.e2el_ms.mean == pytest.approx((160 + 300 + 100) / 3)


@pytest.mark.parametrize(
    ("words", "good"),
    [
        (["ttft:100.1"], [FIRST, THIRD]),
        (["ttft:250", "e2el:200"], [FIRST, THIRD]),
        (["tpot:31"], [FIRST, THIRD]),
        (["itl:50"], [FIRST, THIRD]),
        (["itl:39"], [THIRD]),
        (["e2el:301"], [FIRST, SECOND, THIRD]),
        (["e2el:1"], []),
    ],
)
def test_goodput_counts_requests_within_all_limits(words: list[str], good: list[RequestResult]) -> None:
    limits = metrics.read_limits(words)
    assert [one for one in ALL if metrics.is_good(one, limits)] == good
    s = metrics.summarize(ALL, 2.0, limits)
    assert (s.goodput_per_s, s.good_share) == (len(good) / 2.0, len(good) / 4)


@pytest.mark.parametrize("word", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "tft:5", ":5"])
def test_invalid_limits(word: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput {word}: expected"):
        metrics.read_limits([word])


def test_nothing_completed() -> None:
    s = metrics.summarize([FAILED], 1.0, {"ttft": 5.0})
    assert (s.completed, s.failed, s.goodput_per_s, s.tokens_per_event) == (0, 1, 0.0, None)
    assert (s.ttft_ms, s.tpot_ms, s.itl_ms, s.e2el_ms) == (None, None, None, None)
    assert metrics.summarize([], 0.0, {}).requests_per_s == 0


def test_running_requests_and_failures() -> None:
    touching = [RequestResult(0.0, 1.0), RequestResult(1.0, 2.0), RequestResult(1.0, 3.0)]
    assert list(metrics.running(touching))[-1] == (3.0, 0)
    assert max(num for _, num in metrics.running(touching)) == 2, "one ends before the next begins"
    assert metrics.failures([FIRST, FAILED, RequestResult(0, 0, failure="x"), FAILED]) == {"HTTP 429: full": 2, "x": 1}
