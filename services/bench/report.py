"""What a run is reported as: a table for the terminal, JSON for machines. Pure but for writing files."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from blockyard.services.bench.load.results import RequestResult
from blockyard.services.bench.metrics import LoadSummary, e2el_s, gaps_s, tpot_s, ttft_s
from blockyard.shared.errors import ConfigError
from blockyard.shared.spread import Spread, spread_head, spread_row

BUSY = 0.8  # share of a core from which on the client may be what is measured
MAX_FAILURES = 5  # shown on the terminal


class ClientLoad(msgspec.Struct, frozen=True):
    """What the load generator itself needed."""

    cpu_share: float  # of one core, over the run
    peak_cpu_share: float  # in the busiest second
    late_ms: Spread | None  # from when a request was due until it was sent; None if all were due at once


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
    settings: dict[str, object]  # the flags as read
    summary: LoadSummary
    client: ClientLoad
    failures: dict[str, int]
    requests: list[RequestRow]


class OfflineReport(msgspec.Struct, frozen=True, tag_field="kind", tag="offline"):
    """Of `latency` and `throughput`."""

    command: str
    version: str
    date: str
    model: str | None  # None: the default
    settings: dict[str, object]  # the benchmark's flags
    engine: dict[str, object]  # those of `blockyard serve`
    figures: dict[str, float | Spread | None]


def requests(outcomes: Sequence[RequestResult], started_s: float) -> list[RequestRow]:
    return [_request(one, started_s) for one in outcomes]


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


def write(path: Path, data: bytes) -> None:
    """Raises ConfigError."""
    try:
        path.write_bytes(data)
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e


def as_json(report: ServeReport | OfflineReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"


def text(report: ServeReport) -> str:
    """The terminal's table."""
    s, client = report.summary, report.client
    lines = [
        f"{report.model} at {report.url}: {s.completed} requests completed, {s.failed} failed, in {s.duration_s:.2f} s",
        f"tokens    {s.input_tokens:,} in, {s.output_tokens:,} out of {s.asked_output_tokens:,} asked for",
        f"a second  {s.requests_per_s:,.2f} requests, {s.output_tokens_per_s:,.1f} tokens out,"
        f" {s.total_tokens_per_s:,.1f} in and out; at most {s.peak_running} running",
    ]
    if s.goodput_per_s is not None and s.good_share is not None:
        lines.append(f"goodput   {s.goodput_per_s:,.2f} requests/s within the limits, {s.good_share:.1%} of all")
    lines += ["", spread_head("ms"), spread_row("TTFT", s.ttft_ms), spread_row("TPOT", s.tpot_ms)]
    lines += [spread_row("ITL", s.itl_ms), spread_row("E2EL", s.e2el_ms), ""]
    late = f", sent {client.late_ms.p99:.1f} ms late (p99)" if client.late_ms else ""
    lines.append(f"client    {client.cpu_share:.0%} of a core, {client.peak_cpu_share:.0%} in its busiest second{late}")
    return "\n".join([*lines, *(f"warning: {line}" for line in warnings(report))])


def warnings(report: ServeReport) -> list[str]:
    """What keeps the figures from being what they seem."""
    s, client, found = report.summary, report.client, []
    if max(client.cpu_share, client.peak_cpu_share) > BUSY:
        found.append(f"the client used more than {BUSY:.0%} of a core: it may be what was measured")
    if s.requests_off_length:
        found.append(
            f"{s.requests_off_length} requests ended at another length than asked for; --ignore-eos prevents it"
        )
    if s.requests_without_usage:
        found.append(f"no usage for {s.requests_without_usage} requests: their tokens are the events counted")
    if s.tokens_per_event is not None and s.tokens_per_event > 1.05:
        found.append(f"{s.tokens_per_event:.2f} tokens an event: ITL is the gap between events, TPOT is a token's")
    for reason, num in list(report.failures.items())[:MAX_FAILURES]:
        found.append(f"{num} failed: {reason}")
    return found
