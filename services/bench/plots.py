"""Plots of a run as one file that needs nothing else: HTML with SVG in it. Pure."""

from collections.abc import Sequence

from blockyard.services.bench.load.results import RequestResult
from blockyard.services.bench.metrics import gaps_s, running, ttft_s
from blockyard.services.bench.report import ServeReport, text
from blockyard.shared import charts
from blockyard.shared.charts import MAX_POINTS, Curve, Point, cdf, svg


def timeline(outcomes: Sequence[RequestResult], started_s: float) -> list[Point]:
    """Running requests over time, as steps; of each slot of time the highest count is kept."""
    changes = [(at - started_s, num) for at, num in running(outcomes)]
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


def page(report: ServeReport, outcomes: Sequence[RequestResult], started_s: float) -> str:
    """The whole file; well-formed as XML too."""
    done = [one for one in outcomes if not one.failure]
    gaps = [1000 * gap for one in done for gap in gaps_s(one)]
    drawn = [
        svg("Time to first token", "ms", "share of requests", Curve(cdf([1000 * ttft_s(one) for one in done]))),
        svg("Inter-token latency", "ms", "share of all gaps", Curve(cdf(gaps))),
        svg("Running requests", "s after the start", "requests", Curve(timeline(outcomes, started_s))),
    ]
    return charts.page(f"blockyard bench serve: {report.model}, {report.date}", text(report), drawn)
