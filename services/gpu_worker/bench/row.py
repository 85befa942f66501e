"""A line of the kernel table."""

from typing import NamedTuple

READ_BYTES_PER_S = 4.19e12  # of one NVIDIA H200, measured with torch
BF16_FLOP_PER_S = 785e12


class Row(NamedTuple):
    name: str
    shape: str
    us: float
    bound: str  # what it cannot be quicker than: "memory" or "arithmetic"
    ceiling_share: float  # of that, 1.0 is all


def row(name: str, shape: str, seconds: float, read_bytes: float, operations: float = 0.0) -> Row:
    """Against the slower of the two ceilings."""
    memory, arithmetic = read_bytes / READ_BYTES_PER_S, operations / BF16_FLOP_PER_S
    bound = "memory" if memory >= arithmetic else "arithmetic"
    return Row(name, shape, 1e6 * seconds, bound, max(memory, arithmetic) / seconds)
