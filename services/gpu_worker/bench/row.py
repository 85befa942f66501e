"""A line of the kernel table, and the ceilings of the GPU that it is compared with."""

import functools
from typing import NamedTuple

import torch

from blockyard.services.gpu_worker.bench.timing import graph_seconds

READ_BYTES = 1 << 30
SIZE = 8192  # of the square matrices that are multiplied


class Row(NamedTuple):
    name: str
    shape: str
    us: float
    rate: str  # with its unit: GB/s where memory bounds it, TFLOP/s where arithmetic does
    ceiling_share: float  # of what this GPU reaches there, 1.0 is all


class Ceilings(NamedTuple):
    """Measured on this GPU with torch."""

    read_bytes_per_s: float
    copy_bytes_per_s: float  # read and written
    bf16_flop_per_s: float
    launch_s: float  # of a tiny kernel in a graph


@functools.cache
def ceilings() -> Ceilings:
    """Measured once a process."""
    source = torch.randn(READ_BYTES // 4, device="cuda")
    target, total = torch.empty_like(source), torch.empty((), device="cuda")
    read_s = graph_seconds([lambda: torch.sum(source, 0, out=total)])
    copy_s = graph_seconds([lambda: target.copy_(source)])
    left, right = torch.randn(2, SIZE, SIZE, device="cuda").bfloat16()
    product = torch.empty_like(left)
    product_s = graph_seconds([lambda: torch.mm(left, right, out=product)] * 4)
    launch_s = graph_seconds([lambda: total.add_(1)] * 200)
    return Ceilings(READ_BYTES / read_s, 2 * READ_BYTES / copy_s, 2 * SIZE**3 / product_s, launch_s)


def row(name: str, shape: str, seconds: float, num_bytes: float, operations: float = 0.0) -> Row:
    """Against the slower of the two ceilings: memory (`num_bytes` read and written) and bf16 arithmetic."""
    most = ceilings()
    memory_s, arithmetic_s = num_bytes / most.read_bytes_per_s, operations / most.bf16_flop_per_s
    if memory_s >= arithmetic_s:
        return Row(name, shape, 1e6 * seconds, f"{num_bytes / seconds / 1e9:,.0f} GB/s", memory_s / seconds)
    return Row(name, shape, 1e6 * seconds, f"{operations / seconds / 1e12:,.0f} TFLOP/s", arithmetic_s / seconds)
