"""Histograms with vLLM's buckets, and finer ones between them."""

import math
from bisect import bisect_left
from collections.abc import Iterable


class BucketCounts:
    """A histogram of plain integers in a list: an observation costs a tenth of a microsecond."""

    def __init__(self, bounds: Iterable[float], finer: Iterable[float] = ()) -> None:
        """`bounds` are vLLM's upper limits; `finer` are additional limits of ours."""
        self._vllms = frozenset(bounds)
        self.bounds = sorted(self._vllms | set(finer))
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self._max_value = math.inf

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_many(self, value: float, count: int) -> None:
        """Adds `count` observations of the same value."""
        self.add([(bisect_left(self.bounds, value), count)], count * value)

    def add(self, counts: Iterable[tuple[int, int]], total: float) -> None:
        """Adds observations counted elsewhere: (index of a bucket, observations in it) and the sum of their values."""
        for bucket, count in counts:
            self.counts[bucket] += count
        self.total += total

    def set_max_value(self, value: float) -> None:
        """No value is larger: buckets above it are not shown."""
        self._max_value = value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self, finer: bool) -> list[tuple[str, int]]:
        """Returns cumulative buckets as in Prometheus; without `finer` only vLLM's limits."""
        out, seen = [], 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            seen += count
            if bound <= self._max_value and (finer or bound in self._vllms):
                out.append((_limit(bound), seen))
        out.append(("+Inf", seen + self.counts[-1]))
        return out


def one_two_five(most: int) -> list[int]:
    """Returns 1, 2, 5, 10, 20, 50 and so on up to `most`."""
    found, power = [], 1
    while power <= most:
        found += [digit * power for digit in (1, 2, 5) if digit * power <= most]
        power *= 10
    return found


def _limit(bound: float) -> str:
    """Formats a limit as Prometheus clients do: 10000.0 and 1e+06."""
    return f"{bound:.0e}" if bound >= 1e6 else str(float(bound))
