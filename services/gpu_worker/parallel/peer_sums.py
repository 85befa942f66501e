"""Sums over the ranks of a host by kernels, where a table says that they are quicker than NCCL. Imports Triton."""

import statistics
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from blockyard.kernels.all_reduce.row_tiles import FLAT_TILE, LONGEST_ROW
from blockyard.kernels.all_reduce.sum_ranks import DTYPES, fits, sum_add_rms_norm, sum_ranks
from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.layers.add_rms_norm import add_rms_norm
from blockyard.services.gpu_worker.parallel.peer_memory import PeerMemory
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.sum_table import SIZES, SumTable, SumWay, decode_table, quickest, same_way

HALF_BYTES = 32 << 20  # of a buffer: two ranks sum 16 MiB at a time, four ranks 8 MiB in one step
CALLS, REPLAYS = 10, 5  # of a measurement: calls in a CUDA graph
EPS = 1e-5

Call = Callable[[], object]
KERNELS = (SumWay.ONE_STEP, SumWay.TWO_STEPS)


class PeerSums:
    """Implements `SumKernels` with buffers that all ranks write to."""

    def __init__(self, memory: PeerMemory, table: SumTable) -> None:
        """table: the same on all ranks."""
        self._memory, self._table = memory, table

    def sum(self, part: Tensor) -> Tensor | None:
        way = self._way(part, has_norm=False)
        if way not in KERNELS:
            return None
        return sum_ranks(part.contiguous(), self._memory.buffers, way is SumWay.TWO_STEPS)

    def sum_add_rms_norm(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
    ) -> Tensor | None:
        way = self._way(part, has_norm=True)
        if way not in KERNELS:
            return None
        buffers, two_steps = self._memory.buffers, way is SumWay.TWO_STEPS
        return sum_add_rms_norm(part.contiguous(), residual, weight, eps, buffers, total, two_steps)

    def describe(self) -> str:
        return self._table.describe()

    def check(self) -> None:
        self._memory.check()

    def _way(self, part: Tensor, *, has_norm: bool) -> SumWay:
        way = self._table.way(part.numel() * part.itemsize, has_norm=has_norm)
        row = part.shape[-1] if has_norm else FLAT_TILE
        if not part.numel() or row > LONGEST_ROW or part.dtype not in DTYPES:
            return SumWay.TRANSPORT
        num_rows, two_steps = ceil_div(part.numel(), row), way is SumWay.TWO_STEPS
        return way if fits(num_rows, row * part.itemsize, self._memory.buffers, two_steps) else SumWay.TRANSPORT


def measure_sums(
    group: RankGroup, memory: PeerMemory, width: int, dtype: torch.dtype, *, in_order: bool = False
) -> PeerSums:
    """Collective. Returns sums by the table that the leader has measured. Rows of a model have this width and dtype.

    in_order: parts are added in the order of ranks for all sizes, so that a row's sum does not depend on the number of
    rows.
    """
    if in_order and group.size > 2:  # sums of two have no order
        return PeerSums(memory, same_way(SumWay.ONE_STEP, memory.buffers.one_step_bytes()))
    found = [_times(group, memory, width, dtype, has_norm=has_norm) for has_norm in (False, True)]
    table = SumTable(tuple(found[0]), *map(quickest, found))
    words = torch.tensor(table.encode(), device=group.device)
    group.copy_from_leader(words)
    return PeerSums(memory, decode_table(words.tolist()))


def _times(
    group: RankGroup, memory: PeerMemory, width: int, dtype: torch.dtype, *, has_norm: bool
) -> dict[int, dict[SumWay, float]]:
    """Returns seconds by size and way, which only the leader reads."""
    row_bytes, device = width * dtype.itemsize, memory.device
    times: dict[int, dict[SumWay, float]] = {}
    for num_bytes in SIZES:
        rows = max(num_bytes // row_bytes, 1)
        part, residual = (torch.zeros(rows, width, dtype=dtype, device=device) for _ in range(2))
        weight = torch.ones(width, dtype=dtype, device=device)
        ways = [SumWay.TRANSPORT, *(way for way in KERNELS if _is_candidate(group, memory, way, rows, row_bytes))]
        calls = {way: _call(group, memory, way, part, residual, weight, has_norm=has_norm) for way in ways}
        times[num_bytes] = {way: _time(group, call, device) for way, call in calls.items()}
    return times


def _is_candidate(group: RankGroup, memory: PeerMemory, way: SumWay, rows: int, row_bytes: int) -> bool:
    two_steps = way is SumWay.TWO_STEPS
    return fits(rows, row_bytes, memory.buffers, two_steps) and (group.size > 2 or not two_steps)


def _call(
    group: RankGroup,
    memory: PeerMemory,
    way: SumWay,
    part: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    has_norm: bool,
) -> Call:
    two_steps, buffers = way is SumWay.TWO_STEPS, memory.buffers
    if has_norm:
        if way is SumWay.TRANSPORT:
            return lambda: add_rms_norm(residual, group.sum(part), weight, EPS)
        return lambda: sum_add_rms_norm(part, residual, weight, EPS, buffers, None, two_steps)
    if way is SumWay.TRANSPORT:
        return lambda: group.sum(part)
    return lambda: sum_ranks(part, buffers, two_steps)


def _time(group: RankGroup, call: Call, device: torch.device) -> float:
    """Returns the seconds of one call in a CUDA graph."""
    call()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            call()
    group.least(0)  # no rank is still capturing
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]  # type: ignore[no-untyped-call]
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize(device)
    spans: list[float] = [first.elapsed_time(last) for first, last in pairwise(events)]
    return 1e-3 * statistics.median(spans) / CALLS
