"""Which experts of a layer trade places, so that ranks compute about as many pairs of row and expert each.

Pure functions of numbers, without torch. A rank keeps its number of experts, so each change is a sequence of trades
between two ranks.
"""

import math
from collections.abc import Sequence

import numpy as np

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.parallel.shares import Shard, share

BOUND = 1.1  # of the fullest rank to the mean: up to it nothing moves
AIM = 1.02  # what moves, moves until this
LEAST_GAIN = 0.002  # of a trade, in the fullest rank to the mean: a smaller one is not worth its copies
CHANCE = 4.0  # standard deviations of a rank's load, if pairs fell on ranks by chance: less is no imbalance

Trade = tuple[int, int]  # two experts


def first_owners(num_experts: int, num_ranks: int) -> list[int]:
    """Returns the rank of each expert before any trade."""
    return [rank for rank in range(num_ranks) for _ in share(num_experts, Shard(rank, num_ranks))]


def fullest_to_mean(loads: Ints, owners: Sequence[int], num_ranks: int) -> float:
    """Returns the load of the fullest rank over the mean of all ranks; 1 without any load.

    loads [experts]: pairs of each expert. owners: rank of each expert.
    """
    of_ranks = np.bincount(owners, loads, num_ranks)
    return float(of_ranks.max() / of_ranks.mean()) if of_ranks.any() else 1.0


def is_unbalanced(loads: Ints, owners: Sequence[int], num_ranks: int) -> bool:
    """Returns whether experts should trade places: the fullest rank has too much, and not by chance."""
    mean = float(loads.sum()) / num_ranks
    excess = (fullest_to_mean(loads, owners, num_ranks) - 1) * mean
    return excess > (BOUND - 1) * mean and excess > CHANCE * math.sqrt(mean)


def plan_trades(loads: Ints, owners: Sequence[int], num_ranks: int) -> list[Trade]:
    """Returns trades of two experts of different ranks, in their order.

    Each takes an expert of the fullest rank and one of another, so that the fuller one of both ranks then has as little
    as can be. It ends at AIM, or where no trade gains. Of ranks that are equally full one may gain and another not: the
    last trades that leave the largest load as it was are not done.
    """
    of_expert, ranks = np.array(loads, np.float64), np.array(owners)
    of_ranks = np.bincount(ranks, of_expert, num_ranks)
    mean, found, least, num_kept = of_ranks.mean(), list[Trade](), of_ranks.max(), 0
    while of_ranks.max() > AIM * mean:
        fullest = int(of_ranks.argmax())
        own, others = np.flatnonzero(ranks == fullest), np.flatnonzero(ranks != fullest)
        moved = of_expert[own][:, None] - of_expert[others]
        fuller = np.maximum(of_ranks[fullest] - moved, of_ranks[ranks[others]] + moved)
        first, second = np.unravel_index(int(fuller.argmin()), fuller.shape)
        if fuller[first, second] >= of_ranks[fullest] - LEAST_GAIN * mean:
            break
        given, taken = int(own[first]), int(others[second])
        of_ranks[fullest] -= moved[first, second]
        of_ranks[ranks[taken]] += moved[first, second]
        ranks[given], ranks[taken] = ranks[taken], fullest
        found.append((given, taken))
        if of_ranks.max() < least:
            least, num_kept = of_ranks.max(), len(found)
    return found[:num_kept]
