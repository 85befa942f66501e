"""Learns how long outputs are from sequences that have ended: how likely a sequence ends at each length.

For ranges of lengths it counts how many sequences end by themselves (stop ids, stop strings, cancels). Sequences that
reach their `max_tokens`, and running ones, only say that they have not ended before.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import NamedTuple

BOUNDS = [0, 1, 2, 3, *(quarter << octave for octave in range(19) for quarter in range(4, 8)), 1 << 21]  # tokens
FORGET = 512  # sequences after which earlier ones count half
PRIOR = 1.0  # sequences that are assumed to have been seen in each range
PRIOR_TOKENS = 128  # one of them in so many ends with each token, fewer the longer they are
PRIOR_ENDS = 16  # after so many ends, the ends at all lengths count instead

_WIDTHS = [end - begin for begin, end in pairwise(BOUNDS)]
_PRIOR_RATES = [1 / (begin + PRIOR_TOKENS) for begin in BOUNDS[:-1]]


class OutputLimit(NamedTuple):
    """The maximum length of an output."""

    max_tokens: int
    is_fixed: bool  # the sequence cannot end before


class Survival:
    """The share of sequences that are longer than a number of tokens, if there were no `max_tokens`."""

    def __init__(self, rates: list[float]) -> None:
        self._rates = rates
        hazards = (rate * width for rate, width in zip(rates, _WIDTHS, strict=True))
        self._hazards = [0.0, *accumulate(hazards)]

    def at(self, num_tokens: float) -> float:
        place = min(bisect_right(BOUNDS, num_tokens), len(self._rates)) - 1
        return math.exp(-self._hazards[place] - self._rates[place] * (num_tokens - BOUNDS[place]))

    def mean(self, most: float) -> float:
        """The mean length of sequences that are limited to `most` tokens."""
        total = 0.0
        for place, rate in enumerate(self._rates):
            width = min(BOUNDS[place + 1], most) - BOUNDS[place]
            if width <= 0:
                break
            passed = width if rate * width < 1e-6 else -math.expm1(-rate * width) / rate
            total += math.exp(-self._hazards[place]) * passed
        return total

    def left(self, age: int, limit: OutputLimit) -> float:
        """The expected further tokens of a sequence with `age` tokens."""
        most = limit.max_tokens
        if limit.is_fixed or age >= most:
            return max(0.0, most - age)
        return (self.mean(most) - self.mean(age)) / max(self.at(age), 1e-9)

    def gone(self, age: int, limit: OutputLimit, num_tokens: list[float]) -> list[float]:
        """How likely a sequence with `age` tokens has ended after each of these numbers of further tokens."""
        left = limit.max_tokens - age
        if limit.is_fixed:
            return [float(num >= left) for num in num_tokens]
        alive = max(self.at(age), 1e-9)
        return [1.0 if num >= left else 1 - self.at(age + num) / alive for num in num_tokens]


class LengthHistogram:
    """For each range of lengths: the sequences with their last token in it, and the tokens that they have in it."""

    __slots__ = ("reached", "within")

    def __init__(self) -> None:
        self.reached, self.within = [0.0] * len(_WIDTHS), [0.0] * len(_WIDTHS)

    def add(self, num_tokens: int, weight: float) -> int:
        """Adds a sequence. Returns the index of its range."""
        place = bisect_right(BOUNDS, num_tokens) - 1
        self.reached[place] += weight
        self.within[place] += weight * (num_tokens - BOUNDS[place])
        return place

    def scale(self, factor: float) -> None:
        self.reached = [factor * value for value in self.reached]
        self.within = [factor * value for value in self.within]

    def plus(self, other: "LengthHistogram", factor: float) -> None:
        self.reached = [value + factor * more for value, more in zip(self.reached, other.reached, strict=True)]
        self.within = [value + factor * more for value, more in zip(self.within, other.within, strict=True)]


class OutputLengths:
    """Counts tokens and ends at each length. Running sequences count with the tokens since they were first seen."""

    def __init__(self) -> None:
        self._seen = LengthHistogram()
        self._before = LengthHistogram()  # tokens of running sequences that came before the time that counts
        self._ended = [0.0] * len(_WIDTHS)  # sequences that ended by themselves
        self._num = 0
        self._kept = 1.0  # the weight of `_before` since the last `survival`

    def ended(self, num_tokens: int, by_itself: bool) -> None:
        self._ended[self._seen.add(num_tokens, 1.0)] += by_itself
        self._num += 1
        if self._num == FORGET:
            self._num = 0
            self._seen.scale(0.5)
            self._ended = [0.5 * value for value in self._ended]
            self._kept *= 0.5

    def survival(self, running: Iterable[int], weight: float) -> Survival:
        """`running`: tokens of a sample of the running sequences, each with this weight."""
        now = LengthHistogram()
        for num_tokens in running:
            now.add(num_tokens, weight)
        self._before.scale(self._kept)
        self._before.plus(now, 1 - self._kept)
        self._kept = 1.0
        now.plus(self._seen, 1.0)
        now.plus(self._before, -1.0)
        ended = sum(self._ended)
        tokens = sum(num * begin for num, begin in zip(now.reached, BOUNDS, strict=False)) + sum(now.within)
        usual = ended / max(tokens, 1.0)
        known = ended / (ended + PRIOR_ENDS)
        passed, rates = 0.0, [0.0] * len(_WIDTHS)
        for place in reversed(range(len(_WIDTHS))):
            width = _WIDTHS[place]
            seen = max(0.0, passed * width + now.within[place])
            prior = known * usual + (1 - known) * _PRIOR_RATES[place]
            rates[place] = (self._ended[place] + PRIOR * width * prior) / (seen + PRIOR * width)
            passed += now.reached[place]
        return Survival(rates)
