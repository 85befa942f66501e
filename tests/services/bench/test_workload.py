"""When requests are sent: statistics with a fixed seed."""

import itertools
import math
import random
import statistics

import pytest

from blockyard.services.bench.workload import due_times


def gaps(burstiness: float) -> list[float]:
    times = due_times(20_000, 50.0, burstiness, random.Random(0))
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20_000 / 50.0), "the load does not depend on the seed"
    return [times[0], *(b - a for a, b in itertools.pairwise(times))]


def test_poisson_gaps_are_exponential() -> None:
    found = gaps(1.0)
    assert statistics.mean(found) == pytest.approx(0.02)
    assert statistics.stdev(found) == pytest.approx(0.02, rel=0.03)
    longer_than_the_mean = sum(gap > 0.02 for gap in found) / len(found)
    assert longer_than_the_mean == pytest.approx(math.exp(-1), abs=0.01)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float) -> None:
    found = gaps(burstiness)
    assert statistics.stdev(found) / statistics.mean(found) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_limits_of_both() -> None:
    rng = random.Random(0)
    assert due_times(3, math.inf, 1.0, rng) == [0.0, 0.0, 0.0]
    assert due_times(4, 2.0, math.inf, rng) == [0.5, 1.0, 1.5, 2.0]
    assert due_times(0, 2.0, 1.0, rng) == []


def test_a_seed_is_a_schedule() -> None:
    first, again, other = (due_times(9, 3.0, 1.0, random.Random(seed)) for seed in (1, 1, 2))
    assert first == again != other
