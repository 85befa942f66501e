"""Lines of the kernel table, and the measured limits of the GPU that they are compared with."""

import functools
from typing import NamedTuple

import torch

from blockyard.services.gpu_worker.bench.timing import graph_seconds

READ_BYTES = 1 << 30
SIZE = 8192  # of the square matrices of the GEMM


class Row(NamedTuple):
    name: str
    shape: str
    us: float
    rate: str  # with unit: GB/s if bound by memory, TFLOP/s if bound by arithmetic; or a share of another row's time
    ceiling_share: float  # share of the measured limit of this GPU, 1.0: all of it


class Ceilings(NamedTuple):
    """The limits of this GPU, measured with torch."""

    read_bytes_per_s: float
    copy_bytes_per_s: float  # reads plus writes
    bf16_flop_per_s: float
    launch_s: float  # of a tiny kernel in a graph
    fp8_flop_per_s: float | None = None  # of `torch._scaled_mm` with scales of rows; None: this GPU has no such product


@functools.cache
def ceilings() -> Ceilings:
    """Measures the limits once for each process."""
    source = torch.randn(READ_BYTES // 4, device="cuda")
    target, total = torch.empty_like(source), torch.empty((), device="cuda")
    read_s = graph_seconds([lambda: torch.sum(source, 0, out=total)])
    copy_s = graph_seconds([lambda: target.copy_(source)])
    left, right = torch.randn(2, SIZE, SIZE, device="cuda").bfloat16()
    product = torch.empty_like(left)
    product_s = graph_seconds([lambda: torch.mm(left, right, out=product)] * 4)
    launch_s = graph_seconds([lambda: total.add_(1)] * 200)
    return Ceilings(READ_BYTES / read_s, 2 * READ_BYTES / copy_s, 2 * SIZE**3 / product_s, launch_s, _fp8_flop_per_s())


def _fp8_flop_per_s() -> float | None:
    if torch.cuda.get_device_capability() < (9, 0):
        return None
    left, right = torch.randn(2, SIZE, SIZE, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.ones(SIZE, 1, device="cuda")

    def multiply() -> None:
        torch._scaled_mm(left, right.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16)

    return 2 * SIZE**3 / graph_seconds([multiply] * 4)


def row(
    name: str, shape: str, seconds: float, num_bytes: float, operations: float = 0.0, *, in_8_bits: bool = False
) -> Row:
    """Makes a line, compared with the limit that takes longer: memory (`num_bytes` moved) or arithmetic, in bf16 or
    in 8 bits."""
    most = ceilings()
    flop_per_s = (most.fp8_flop_per_s if in_8_bits else None) or most.bf16_flop_per_s
    memory_s, arithmetic_s = num_bytes / most.read_bytes_per_s, operations / flop_per_s
    if memory_s >= arithmetic_s:
        return Row(name, shape, 1e6 * seconds, f"{num_bytes / seconds / 1e9:,.0f} GB/s", memory_s / seconds)
    return Row(name, shape, 1e6 * seconds, f"{operations / seconds / 1e12:,.0f} TFLOP/s", arithmetic_s / seconds)
