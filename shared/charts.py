"""Charts as SVG, and self-contained HTML pages of charts."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 560, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 34, 40  # margins
MAX_POINTS = 500  # of a curve; more are not visible
COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#64748b")
DARK_COLOURS = ("#6ea0ff", "#fb923c", "#34d399", "#c084fc", "#f87171", "#22d3ee", "#facc15", "#94a3b8")
CHART_STYLE = (
    "svg text{font:12px system-ui,sans-serif;fill:#4a5565}svg .title{font-weight:600;fill:#1c2430}"
    ".grid{stroke:#e3e7ed}.line{fill:none;stroke-width:1.8}"
    + "".join(f".line.c{i}{{stroke:{c}}}svg text.c{i}{{fill:{c}}}" for i, c in enumerate(COLOURS))
)
STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1160px;padding:0 1rem;"
    "background:#fff;color:#1c2430}pre{background:#f3f5f8;padding:1rem;overflow-x:auto}"
    ".plots{display:flex;flex-wrap:wrap;gap:1rem}svg{max-width:100%}"
    + CHART_STYLE
    + "@media(prefers-color-scheme:dark){body{background:#12161c;color:#dfe5ee}pre{background:#1b212a}"
    "svg text{fill:#9aa6b8}svg .title{fill:#dfe5ee}.grid{stroke:#2a323e}"
    + "".join(f".line.c{i}{{stroke:{c}}}svg text.c{i}{{fill:{c}}}" for i, c in enumerate(DARK_COLOURS))
    + "}"
)

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    points: Sequence[Point]
    name: str = ""  # in the legend; empty: no legend


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
    """Returns 1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))


def cdf(values: Sequence[float]) -> list[Point]:
    """Returns (value, share of values not above it) for at most MAX_POINTS values, with the first and last."""
    ordered = sorted(values)
    num = len(ordered)
    kept = (
        range(num) if num <= MAX_POINTS else sorted({round(i * (num - 1) / MAX_POINTS) for i in range(MAX_POINTS + 1)})
    )
    return [(ordered[i], (i + 1) / num) for i in kept]


def svg(title: str, x_label: str, y_label: str, *curves: Curve) -> str:
    """Returns a chart of curves on common axes that begin at 0; empty without points."""
    points = [point for curve in curves for point in curve.points]
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
    for i, curve in enumerate(curves):
        line = " ".join(f"{x.px(a):.1f},{y.px(b):.1f}" for a, b in curve.points)
        parts.append(f'<polyline class="line c{i % len(COLOURS)}" points="{line}"/>')
    parts += _legend(curves)
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img"'
    return f"<svg {head}>{''.join(parts)}</svg>"


def _legend(curves: Sequence[Curve]) -> list[str]:
    """Returns the names in their colours, right-aligned in the title's line."""
    at, parts = float(WIDTH - RIGHT), []
    for i, curve in reversed(list(enumerate(curves))):
        if curve.name:
            name = html.escape(curve.name)
            parts.append(f'<text class="c{i % len(COLOURS)}" x="{at:.0f}" y="18" text-anchor="end">{name}</text>')
            at -= 7 * len(curve.name) + 12
    return parts


def page(title: str, text: str, charts: Sequence[str]) -> str:
    """Returns an HTML file, also well-formed XML, with `text` as preformatted text."""
    title = html.escape(title)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1><pre>{html.escape(text)}</pre>"
        f'<div class="plots">{"".join(charts)}</div></body></html>\n'
    )


def sheet(charts: Sequence[str], columns: int = 2) -> str:
    """Returns one SVG file with charts side by side on white, for documents."""
    placed = []
    for i, chart in enumerate(charts):
        row, column = divmod(i, columns)
        placed.append(chart.replace("<svg ", f'<svg x="{column * WIDTH}" y="{row * HEIGHT}" height="{HEIGHT}" ', 1))
    width, height = columns * WIDTH, -(-len(charts) // columns) * HEIGHT
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    back = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return f"<svg {head}><style>{CHART_STYLE}</style>{back}{''.join(placed)}</svg>\n"
