"""Trades of experts keep the number of experts of each rank, and lower the load of the fullest."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blockyard.services.gpu_worker.parallel.expert_balance import (
    AIM,
    BOUND,
    first_owners,
    fullest_to_mean,
    is_unbalanced,
    plan_trades,
)

BAR = 1.15
layers = st.integers(1, 6).flatmap(
    lambda ranks: st.tuples(st.just(ranks), st.lists(st.integers(0, 10_000), min_size=ranks, max_size=24))
)


@given(layers)
@example((4, [1571, 1571, 2790, 1571, 5463, 1579, 5455]))  # two ranks are equally full, and one can get no lower
def test_trades_keep_numbers_of_experts_and_never_fill_the_fullest(layer: tuple[int, list[int]]) -> None:
    num_ranks, some = layer
    loads, owners = np.array(some), first_owners(len(some), num_ranks)
    counts, before = np.bincount(owners), fullest_to_mean(loads, owners, num_ranks)
    trades = plan_trades(loads, owners, num_ranks)
    assert len(trades) <= len(some) ** 2
    for one, other in trades:
        assert owners[one] != owners[other]
        owners[one], owners[other] = owners[other], owners[one]
    assert np.bincount(owners).tolist() == counts.tolist()
    after = fullest_to_mean(loads, owners, num_ranks)
    assert after < before or not trades
    assert not plan_trades(loads, owners, num_ranks) or after > AIM
    if before <= AIM:
        assert not trades


@given(st.lists(st.integers(1, 1000), min_size=8, max_size=8))
def test_two_ranks_come_near_the_best_that_there_is(some: list[int]) -> None:
    """Not to it: trades of one expert each are a local search."""
    loads, owners = np.array(some), first_owners(8, 2)
    for one, other in plan_trades(loads, owners, 2):
        owners[one], owners[other] = owners[other], owners[one]
    best = min(max(sum(half), loads.sum() - sum(half)) for half in itertools.combinations(some, 4)) / loads.sum() * 2
    assert fullest_to_mean(loads, owners, 2) <= max(best * 1.1, AIM)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(64, 2), (64, 4), (60, 4), (128, 3), (128, 8), (256, 8)])
def test_skewed_routing(num_experts: int, num_ranks: int) -> None:
    """A tenth of the experts, the first ones, get half of the tokens."""
    random, hot = np.random.default_rng(num_experts), num_experts // 10
    shares = random.gamma(20, 1, num_experts)
    shares[:hot] *= shares[hot:].sum() / shares[:hot].sum()
    loads, owners = (shares / shares.sum() * 1e6).astype(np.int64), first_owners(num_experts, num_ranks)
    assert is_unbalanced(loads, owners, num_ranks) and fullest_to_mean(loads, owners, num_ranks) > 1.4
    trades = plan_trades(loads, owners, num_ranks)
    for one, other in trades:
        owners[one], owners[other] = owners[other], owners[one]
    assert fullest_to_mean(loads, owners, num_ranks) <= BAR
    assert len(trades) <= num_experts / 4


def test_nothing_moves_by_chance_or_for_little() -> None:
    owners = first_owners(4, 2)
    assert owners == [0, 0, 1, 1] and first_owners(5, 2) == [0, 0, 1, 1, 1]
    assert not is_unbalanced(np.array([12, 0, 6, 0]), owners, 2), "a third more, of 9 on average"
    assert is_unbalanced(np.array([1200, 0, 600, 0]), owners, 2)
    assert not is_unbalanced(np.array([500_000, 0, 500_000 * (2 - BOUND) / BOUND + 1, 0]), owners, 2)
    assert fullest_to_mean(np.zeros(4), owners, 2) == 1.0
    assert plan_trades(np.array([9000, 0, 0, 0]), owners, 2) == [], "an expert is on one rank"
