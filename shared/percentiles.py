"""Mean and percentiles of measured values, and their row in a table."""

from collections.abc import Iterable, Sequence

import msgspec


class Percentiles(msgspec.Struct, frozen=True):
    """Mean, percentiles and maximum, in the unit of the values."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Returns a percentile of ascending values, interpolated linearly as numpy does by default."""
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def percentiles_of(values: Iterable[float], scale: float = 1.0) -> Percentiles | None:
    """Returns None without values."""
    ordered = sorted(value * scale for value in values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
    return Percentiles(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def percentiles_head(unit: str, width: int = 10) -> str:
    return f"{unit:<{width}}" + "".join(f"{name:>11}" for name in ("mean", "p50", "p90", "p99", "max"))


def percentiles_row(name: str, values: Percentiles | None, width: int = 10) -> str:
    if values is None:
        return f"{name:<{width}}" + f"{'-':>11}" * 5
    cells = (values.mean, values.p50, values.p90, values.p99, values.max)
    return f"{name:<{width}}" + "".join(f"{cell:>11,.2f}" for cell in cells)
