"""Metrics of a run, defined as in vLLM's and SGLang's benchmarks. Pure.

TTFT  from sending a request (before its connection is opened) to its first token
TPOT  one value a request: (E2EL - TTFT) / (output tokens - 1); requests of one token have none
ITL   every gap between two events that carry tokens, of all requests pooled
E2EL  from sending a request to its last token
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from blockyard.services.bench.load.results import RequestResult
from blockyard.shared.errors import ConfigError
from blockyard.shared.percentiles import Percentiles, percentiles_of

LIMITED = ("ttft", "tpot", "itl", "e2el")


class LoadSummary(msgspec.Struct, frozen=True):
    """Totals and percentiles of a run. `None` where there was nothing to measure."""

    completed: int
    failed: int
    duration_s: float
    input_tokens: int
    output_tokens: int  # of completed requests, by the server's usage
    asked_output_tokens: int
    requests_off_length: int  # completed with another number of output tokens than requested
    requests_without_usage: int  # their events are counted as tokens
    tokens_per_event: float | None  # 1 if each event has one token; ITL is measured between events
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    peak_running: int
    goodput_per_s: float | None  # completed requests per second within all limits
    good_share: float | None  # of all requests including failed ones
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2el_ms: Percentiles | None


def ttft_s(one: RequestResult) -> float:
    return one.tokens_s[0] - one.sent_s


def e2el_s(one: RequestResult) -> float:
    return one.ended_s - one.sent_s


def gaps_s(one: RequestResult) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(one.tokens_s)]


def tpot_s(one: RequestResult) -> float | None:
    if one.output_tokens < 2:
        return None
    return (one.ended_s - one.tokens_s[0]) / (one.output_tokens - 1)


def read_limits(words: Sequence[str]) -> dict[str, float]:
    """Parses `ttft:500 itl:50`, limits in ms. Raises ConfigError."""
    limits: dict[str, float] = {}
    for word in words:
        name, _, text = word.partition(":")
        try:
            limits[name] = float(text)
        except ValueError:
            raise ConfigError(f"--goodput {word}: expected a limit in ms such as ttft:500") from None
        if name not in LIMITED or not limits[name] > 0:
            raise ConfigError(f"--goodput {word}: expected one of {', '.join(LIMITED)} and a limit in ms above 0")
    return limits


def is_good(one: RequestResult, limits: Mapping[str, float]) -> bool:
    """Whether it completed within all limits (ms); every gap of the request must be within the limit of ITL."""
    if one.failure:
        return False
    values = {
        "ttft": ttft_s(one),
        "tpot": tpot_s(one) or 0.0,
        "itl": max(gaps_s(one), default=0.0),
        "e2el": e2el_s(one),
    }
    return all(1000 * values[name] <= limit for name, limit in limits.items())


def running(results: Sequence[RequestResult]) -> Iterator[tuple[float, int]]:
    """Yields (time, running requests) at each change; at equal times, ends come before starts."""
    changes = sorted([(one.sent_s, 1) for one in results] + [(one.ended_s, -1) for one in results])
    num = 0
    for at, change in changes:
        num += change
        yield at, num


def summarize(results: Sequence[RequestResult], duration_s: float, limits: Mapping[str, float]) -> LoadSummary:
    done = [one for one in results if not one.failure]
    num_good = sum(is_good(one, limits) for one in results)
    output, events = sum(one.output_tokens for one in done), sum(len(one.tokens_s) for one in done)
    options = sum(one.num_input or 0 for one in done)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    tpots = [tpot_s(one) for one in done]
    return LoadSummary(
        completed=len(done),
        failed=len(results) - len(done),
        duration_s=duration_s,
        input_tokens=options,
        output_tokens=output,
        asked_output_tokens=sum(one.asked_output for one in done),
        requests_off_length=sum(one.output_tokens != one.asked_output for one in done),
        requests_without_usage=sum(one.num_output is None for one in done),
        tokens_per_event=output / events if events else None,
        requests_per_s=len(done) * per_s,
        output_tokens_per_s=output * per_s,
        total_tokens_per_s=(options + output) * per_s,
        peak_running=max((num for _, num in running(results)), default=0),
        goodput_per_s=num_good * per_s if limits else None,
        good_share=num_good / len(results) if limits and results else None,
        ttft_ms=percentiles_of((ttft_s(one) for one in done), 1000),
        tpot_ms=percentiles_of((t for t in tpots if t is not None), 1000),
        itl_ms=percentiles_of((gap for one in done for gap in gaps_s(one)), 1000),
        e2el_ms=percentiles_of((e2el_s(one) for one in done), 1000),
    )


def failures(results: Sequence[RequestResult]) -> dict[str, int]:
    """Returns the count of each failure, most frequent first."""
    return dict(Counter(one.failure for one in results if one.failure).most_common())
