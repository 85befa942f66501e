"""Plots of a run as one file that needs nothing else: HTML with SVG in it. Pure."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from blockyard.services.launcher.bench.metrics import gaps_s, running, ttft_s
from blockyard.services.launcher.bench.outcome import Outcome
from blockyard.services.launcher.bench.report import ServeReport, text

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 40  # margins
MAX_POINTS = 500  # of a curve; more cannot be seen
STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1160px;padding:0 1rem;background:#fff;color:#1c2430}
pre{background:#f3f5f8;padding:1rem;overflow-x:auto}.plots{display:flex;flex-wrap:wrap;gap:1rem}svg{max-width:100%}
svg text{font:12px system-ui,sans-serif;fill:#4a5565}svg .title{font-weight:600;fill:#1c2430}
.grid{stroke:#e3e7ed}.line{fill:none;stroke:#2563eb;stroke-width:1.8}
@media(prefers-color-scheme:dark){body{background:#12161c;color:#dfe5ee}pre{background:#1b212a}
svg text{fill:#9aa6b8}svg .title{fill:#dfe5ee}.grid{stroke:#2a323e}.line{stroke:#6ea0ff}}
"""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Axis:
    """Values to pixels, with round numbers at its ticks."""

    low: float
    high: float
    first_px: float
    last_px: float

    def px(self, value: float) -> float:
        return self.first_px + (value - self.low) / (self.high - self.low) * (self.last_px - self.first_px)

    def ticks(self) -> list[float]:
        step = round_step((self.high - self.low) / 5)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def cdf(values: Sequence[float]) -> list[Point]:
    """(value, share of values not above it), thinned out to what can be seen; both ends stay."""
    ordered = sorted(values)
    num = len(ordered)
    kept = (
        range(num) if num <= MAX_POINTS else sorted({round(i * (num - 1) / MAX_POINTS) for i in range(MAX_POINTS + 1)})
    )
    return [(ordered[i], (i + 1) / num) for i in kept]


def timeline(outcomes: Sequence[Outcome], started_s: float) -> list[Point]:
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


def svg(title: str, x_label: str, y_label: str, points: Sequence[Point]) -> str:
    """One curve with axes."""
    if not points:
        return ""
    x = Axis(0.0, max([1e-6, *(a for a, _ in points)]), LEFT, WIDTH - RIGHT)
    y = Axis(0.0, max([1e-6, *(b for _, b in points)]), HEIGHT - BOTTOM, TOP)
    parts = [f'<text class="title" x="{LEFT}" y="18">{html.escape(title)}</text>']
    for tick in x.ticks():
        at = f"{x.px(tick):.1f}"
        parts.append(f'<line class="grid" x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(f'<text x="{at}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in y.ticks():
        at = f"{y.px(tick):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{float(at) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>'
    )
    parts.append(f'<text x="{LEFT}" y="{TOP - 4}">{html.escape(y_label)}</text>')
    line = " ".join(f"{x.px(a):.1f},{y.px(b):.1f}" for a, b in points)
    parts.append(f'<polyline class="line" points="{line}"/>')
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img"'
    return f"<svg {head}>{''.join(parts)}</svg>"


def page(report: ServeReport, outcomes: Sequence[Outcome], started_s: float) -> str:
    """The whole file; well-formed as XML too."""
    done = [one for one in outcomes if not one.failure]
    drawn = [
        svg("Time to first token", "ms", "share of requests", cdf([1000 * ttft_s(one) for one in done])),
        svg("Inter-token latency", "ms", "share of all gaps", cdf([1000 * gap for one in done for gap in gaps_s(one)])),
        svg("Running requests", "s after the start", "requests", timeline(outcomes, started_s)),
    ]
    title = html.escape(f"blockyard bench serve: {report.model}, {report.date}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1><pre>{html.escape(text(report))}</pre>"
        f'<div class="plots">{"".join(drawn)}</div></body></html>\n'
    )
