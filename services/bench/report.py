"""Reports of a run: a table for the terminal, JSON, and an HTML page with plots. Pure apart from `write`."""

import datetime
from collections.abc import Sequence
from pathlib import Path

import msgspec

from blockyard.services.bench.load.results import RequestResult
from blockyard.services.bench.metrics import LoadSummary, e2el_s, gaps_s, running, tpot_s, ttft_s
from blockyard.shared import charts
from blockyard.shared.charts import MAX_POINTS, Curve, Point, cdf, svg
from blockyard.shared.errors import ConfigError
from blockyard.shared.percentiles import Percentiles, percentiles_head, percentiles_row

BUSY = 0.8  # share of a core above which the client may limit the measured rate
MAX_FAILURES = 5  # shown on the terminal
POOLING_ENDPOINTS = ("embeddings", "rerank")  # their answers have no tokens, and so no times between them


class ClientLoad(msgspec.Struct, frozen=True):
    """CPU use and lateness of the load generator itself."""

    cpu_share: float  # of one core, over the run
    peak_cpu_share: float  # in the busiest second
    late_ms: Percentiles | None  # delay between due and sent; None if all were due at once


class RequestRow(msgspec.Struct, frozen=True):
    """One request in the JSON; times in ms."""

    sent_s: float  # after the start
    input_tokens: int | None
    output_tokens: int
    asked_output_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    max_gap_ms: float | None
    e2el_ms: float
    failure: str


class ServeReport(msgspec.Struct, frozen=True, tag_field="kind", tag="serve"):
    version: str
    date: str
    url: str
    model: str
    settings: dict[str, object]  # the parsed flags
    summary: LoadSummary
    client: ClientLoad
    failures: dict[str, int]
    requests: list[RequestRow]


class OfflineReport(msgspec.Struct, frozen=True, tag_field="kind", tag="offline"):
    """Report of `bench latency` and `bench throughput`."""

    command: str
    version: str
    date: str
    model: str | None  # None: the default model
    settings: dict[str, object]  # flags of the benchmark
    engine: dict[str, object]  # flags of `blockyard serve`
    figures: dict[str, float | Percentiles | None]


def request_rows(results: Sequence[RequestResult], started_s: float) -> list[RequestRow]:
    return [_request(one, started_s) for one in results]


def _request(one: RequestResult, started_s: float) -> RequestRow:
    per_token = None if one.failure else tpot_s(one)
    return RequestRow(
        sent_s=one.sent_s - started_s,
        input_tokens=one.num_input,
        output_tokens=one.output_tokens,
        asked_output_tokens=one.asked_output,
        ttft_ms=None if one.failure else 1000 * ttft_s(one),
        tpot_ms=None if per_token is None else 1000 * per_token,
        max_gap_ms=None if one.failure else 1000 * max(gaps_s(one), default=0.0),
        e2el_ms=1000 * e2el_s(one),
        failure=one.failure,
    )


def write(path: str | Path, data: bytes) -> None:
    """Raises ConfigError."""
    try:
        Path(path).write_bytes(data)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e


def date() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def as_json(report: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def text(report: ServeReport) -> str:
    """Returns the table for the terminal."""
    s, client = report.summary, report.client
    lines = [
        f"{report.model} at {report.url}: {s.completed} requests completed, {s.failed} failed, in {s.duration_s:.2f} s",
    ]
    lines += _pooling_rates(report) if report.settings.get("endpoint") in POOLING_ENDPOINTS else _rates(s)
    if s.goodput_per_s is not None and s.good_share is not None:
        lines.append(f"goodput   {s.goodput_per_s:,.2f} requests/s within the limits, {s.good_share:.1%} of all")
    lines += ["", percentiles_head("ms")]
    if report.settings.get("endpoint") not in POOLING_ENDPOINTS:
        lines += [percentiles_row("TTFT", s.ttft_ms), percentiles_row("TPOT", s.tpot_ms)]
        lines.append(percentiles_row("ITL", s.itl_ms))
    lines += [percentiles_row("E2EL", s.e2el_ms), ""]
    late = f", sent {client.late_ms.p99:.1f} ms late (p99)" if client.late_ms else ""
    lines.append(f"client    {client.cpu_share:.0%} of a core, {client.peak_cpu_share:.0%} in its busiest second{late}")
    return "\n".join([*lines, *(f"warning: {line}" for line in warnings(report))])


def _rates(s: LoadSummary) -> list[str]:
    return [
        f"tokens    {s.input_tokens:,} in, {s.output_tokens:,} out of {s.asked_output_tokens:,} asked for",
        f"a second  {s.requests_per_s:,.2f} requests, {s.output_tokens_per_s:,.1f} tokens out,"
        f" {s.total_tokens_per_s:,.1f} in and out; at most {s.peak_running} running",
    ]


def _pooling_rates(report: ServeReport) -> list[str]:
    s, texts = report.summary, report.settings.get("batch_size")
    assert isinstance(texts, int)
    return [
        f"tokens    {s.input_tokens:,} in, {texts} texts a request",
        f"a second  {s.requests_per_s:,.2f} requests, {s.requests_per_s * texts:,.1f} texts,"
        f" {s.total_tokens_per_s:,.1f} tokens; at most {s.peak_running} running",
    ]


def warnings(report: ServeReport) -> list[str]:
    """Returns reasons why the figures may not mean what they say."""
    s, client, found = report.summary, report.client, []
    if max(client.cpu_share, client.peak_cpu_share) > BUSY:
        found.append(f"the client used more than {BUSY:.0%} of a core: it may be the limit that was measured")
    if s.requests_off_length:
        found.append(f"{s.requests_off_length} requests did not have the requested length; --ignore-eos prevents it")
    if s.requests_without_usage:
        found.append(f"no usage for {s.requests_without_usage} requests: their token counts are counts of events")
    if s.tokens_per_event is not None and s.tokens_per_event > 1.05:
        found.append(f"{s.tokens_per_event:.2f} tokens an event: ITL is measured between events, TPOT per token")
    for reason, num in list(report.failures.items())[:MAX_FAILURES]:
        found.append(f"{num} failed: {reason}")
    return found


def timeline(results: Sequence[RequestResult], started_s: float) -> list[Point]:
    """Returns running requests over time as steps, with the highest count of each time slot."""
    changes = [(at - started_s, num) for at, num in running(results)]
    if not changes:
        return []
    slot = max(changes[-1][0], 1e-9) / MAX_POINTS
    highest: dict[int, tuple[float, int]] = {}
    for at, num in changes:
        known = highest.get(int(at / slot))
        if known is None or num >= known[1]:
            highest[int(at / slot)] = (at, num)
    steps: list[Point] = [(0.0, 0.0)]
    for at, num in [*highest.values(), changes[-1]]:
        steps += [(at, steps[-1][1]), (at, float(num))]
    return steps


def page(report: ServeReport, results: Sequence[RequestResult], started_s: float) -> str:
    """Returns an HTML file with SVG plots, well-formed as XML, which loads nothing else."""
    done = [one for one in results if not one.failure]
    gaps = [1000 * gap for one in done for gap in gaps_s(one)]
    drawn = [
        svg("Time to first token", "ms", "share of requests", Curve(cdf([1000 * ttft_s(one) for one in done]))),
        svg("Inter-token latency", "ms", "share of all gaps", Curve(cdf(gaps))),
        svg("Running requests", "s after the start", "requests", Curve(timeline(results, started_s))),
    ]
    return charts.page(f"blockyard bench serve: {report.model}, {report.date}", text(report), drawn)
