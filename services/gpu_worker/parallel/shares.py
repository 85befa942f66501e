"""Which part of successive units a rank has. Pure functions of numbers, without torch.

Every unit is on at least one rank, in order. With fewer units than ranks, several ranks have the same one.
"""

from typing import NamedTuple

LARGEST_STEP = 128  # single features are divided by so many: a group of most quantization formats, a block of fp8
LEAST_STEP = 32  # a block of mxfp4: smaller steps are taken only for few features


class Shard(NamedTuple):
    """One of the ranks that a model is divided among."""

    rank: int = 0
    size: int = 1


WHOLE = Shard()


def over_replicas(shard: Shard, replica: Shard) -> Shard:
    """Returns a rank's place among the ranks of all replicas. shard: its place in its own one."""
    return Shard(replica.rank * shard.size + shard.rank, replica.size * shard.size)


def share(units: int, shard: Shard) -> range:
    """Returns the units of a rank: as many as others have, or one more; or one unit that other ranks have, too."""
    rank, size = shard
    if units < size:
        first = units * rank // size
        return range(first, first + 1)
    return range(units * rank // size, units * (rank + 1) // size)


def share_of_groups(units: int, groups: int, shard: Shard) -> range:
    """Returns the units of a rank, as query heads that share K/V heads: they are where their group is.

    Groups are divided as by `share`. Ranks with the same group divide its units, so that a rank has units of whole
    groups, or of one. Every unit is on one rank, if there are at least as many units as ranks.
    """
    (rank, size), per_group = shard, units // groups
    if groups >= size:
        own = share(groups, shard)
        return range(own.start * per_group, own.stop * per_group)
    group = groups * rank // size
    first, stop = -(-group * size // groups), -(-(group + 1) * size // groups)  # ranks with this group
    own = share(per_group, Shard(rank - first, stop - first))
    return range(group * per_group + own.start, group * per_group + own.stop)


def single_units(features: int, size: int) -> int:
    """Returns the number of units by which single features are divided, so that each rank has some.

    They are as large as can be; or smaller, if then all ranks have as many features.
    """
    step = LARGEST_STEP
    while step > 1 and (features % step or features < step * size):
        step //= 2
    even = step
    while even > 1 and features % (even * size):
        even //= 2
    is_even = features % (even * size) == 0
    return features // (even if is_even and (even >= LEAST_STEP or step < LEAST_STEP) else step)
