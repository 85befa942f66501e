"""Which way of summing over ranks is the quickest for a size. Pure functions of numbers, without torch."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

SIZES = tuple(1 << n for n in (14, 16, 18, 20, 21, 22, 23, 24, 25))  # bytes of a part, that are measured


class SumWay(IntEnum):
    """The numbers are what ranks tell each other."""

    TRANSPORT = 0  # NCCL
    ONE_STEP = 1  # kernels/all_reduce/one_step.py
    TWO_STEPS = 2
    SYMMETRIC_MEMORY = 3  # torch's kernels


@dataclass(frozen=True, slots=True)
class SumTable:
    """The ways for each size, of sums alone and of those with the residual and a norm behind them."""

    sizes: tuple[int, ...]  # bytes of a part, ascending
    alone: tuple[SumWay, ...]
    with_norm: tuple[SumWay, ...]

    def way(self, num_bytes: int, *, has_norm: bool) -> SumWay:
        """The way that is the quickest at the next larger measured size. Beyond all: the transport."""
        at = bisect_left(self.sizes, num_bytes)
        if at == len(self.sizes):
            return SumWay.TRANSPORT
        return (self.with_norm if has_norm else self.alone)[at]

    def encode(self) -> list[int]:
        return [*self.sizes, *self.alone, *self.with_norm]

    def describe(self) -> str:
        """A line for the report of a start."""
        return f"sums of ranks: {_ranges(self.sizes, self.alone)}; with a norm: {_ranges(self.sizes, self.with_norm)}"


def decode_table(numbers: Sequence[int]) -> SumTable:
    """The reverse of `SumTable.encode`."""
    num = len(numbers) // 3
    sizes, alone, with_norm = numbers[:num], numbers[num : 2 * num], numbers[2 * num :]
    return SumTable(tuple(sizes), tuple(map(SumWay, alone)), tuple(map(SumWay, with_norm)))


def same_way(way: SumWay, num_bytes: int) -> SumTable:
    """A table of one way, up to a size."""
    return SumTable((num_bytes,), (way,), (way,))


def quickest(times: Mapping[int, Mapping[SumWay, float]], slack: float = 0.02) -> tuple[SumWay, ...]:
    """Returns the way of each size. times: seconds, by size and way.

    The transport has to be quicker by `slack`: a way that varies with the noise of a start helps nobody.
    """
    ways = []
    for of_size in times.values():
        known = {way: seconds * (1 + slack * (way is SumWay.TRANSPORT)) for way, seconds in of_size.items()}
        ways.append(min(known, key=known.__getitem__))
    return tuple(ways)


def _ranges(sizes: Sequence[int], ways: Sequence[SumWay]) -> str:
    """For example 'one step to 2 MiB, transport'."""
    parts = []
    for at, way in enumerate(ways):
        if at + 1 == len(ways) or ways[at + 1] is not way:
            parts.append(f"{way.name.lower().replace('_', ' ')} to {_size(sizes[at])}")
    return ", ".join(parts)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"
