"""Measures the ways to sum over ranks, at the first start of a worker on a machine. Imports Triton."""

import logging
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from blockyard.kernels.layers.add_rms_norm import add_rms_norm
from blockyard.services.gpu_worker.parallel.peer_memory import PeerMemory
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.sums.peer_sums import HALF_BYTES, PeerSums, SymmetricSums
from blockyard.services.gpu_worker.parallel.sums.sum_cache import SumCache, SumKey
from blockyard.services.gpu_worker.parallel.sums.sum_table import (
    SIZES,
    SumTable,
    SumWay,
    decode_table,
    quickest,
    same_way,
)

log = logging.getLogger(__name__)

CALLS, REPLAYS = 10, 5  # of a measurement: calls in a CUDA graph
EPS = 1e-5
NOT_MEASURED = SumTable(SIZES, *[(SumWay.TRANSPORT,) * len(SIZES)] * 2)
KNOWN = ", as measured before"

Call = Callable[[], object]
Calls = dict[SumWay, Call]


class SumMeasurement:
    """Times the ways to sum rows of a model. All ranks call the same method at the same place of their start."""

    def __init__(
        self,
        group: RankGroup,
        memory: PeerMemory,
        symmetric: SymmetricSums | None,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        """width, dtype: of the rows."""
        self._group, self._memory, self._symmetric = group, memory, symmetric
        self._width, self._dtype = width, dtype
        # two ranks send no less in two steps
        ways = [SumWay.ONE_STEP, *([SumWay.TWO_STEPS] if group.size > 2 else []), SumWay.SYMMETRIC_MEMORY]
        self._by_way = {way: self._sums(same_way(way, SIZES[-1])) for way in ways}

    def in_order(self) -> PeerSums:
        """Returns sums of parts in the order of ranks: a row's sum does not depend on the number of rows."""
        if self._group.size == 2:  # sums of two have no order
            return self.quickest()
        return self._sums(same_way(SumWay.ONE_STEP, self._memory.buffers.one_step_bytes()))

    def quickest(self) -> PeerSums:
        """Returns sums by the table that the leader measures."""
        table = _leaders(self._group, replace(NOT_MEASURED, alone=quickest(self._times(self._calls_alone))))
        alone = self._sums(table)  # what several kernels sum by, before the norm
        times = self._times(partial(self._calls_with_norm, alone))
        return self._sums(_leaders(self._group, replace(table, with_norm=quickest(times))))

    def _sums(self, table: SumTable) -> PeerSums:
        keeps = SumWay.SYMMETRIC_MEMORY in table.alone  # otherwise its memory is free after the measurement
        return PeerSums(self._memory, self._symmetric if keeps else None, table)

    def _times(self, calls_of: Callable[[Tensor], Calls]) -> dict[int, dict[SumWay, float]]:
        """Returns the seconds of this rank by size and way."""
        times = {}
        for num_bytes in SIZES:
            calls = calls_of(_rows(num_bytes, self._width, self._dtype, self._memory.device))
            times[num_bytes] = {way: _time(self._group, call, self._memory.device) for way, call in calls.items()}
        return times

    def _calls_alone(self, part: Tensor) -> Calls:
        calls: Calls = {SumWay.TRANSPORT: partial(self._group.sum, part)}
        return calls | {way: partial(sums.sum, part) for way, sums in self._takers(part, has_norm=False).items()}

    def _calls_with_norm(self, alone: PeerSums, part: Tensor) -> Calls:
        residual, weight = torch.zeros_like(part), torch.ones_like(part[0])

        def sum_then_norm() -> Tensor:
            total = alone.sum(part)
            return add_rms_norm(residual, self._group.sum(part) if total is None else total, weight, EPS)

        return {SumWay.TRANSPORT: sum_then_norm} | {
            way: partial(sums.sum_add_rms_norm, part, residual, weight, EPS)
            for way, sums in self._takers(part, has_norm=True).items()
        }

    def _takers(self, part: Tensor, *, has_norm: bool) -> dict[SumWay, PeerSums]:
        return {way: sums for way, sums in self._by_way.items() if sums.way(part, has_norm=has_norm) is way}


def choose_sums(
    group: RankGroup,
    folder: Path,
    width: int,
    dtype: torch.dtype,
    note: Callable[[str], None],
    *,
    in_order: bool,
    cache: SumCache | None = None,
) -> PeerSums | None:
    """Collective. Returns what sums rows of this width beside NCCL; None: a GPU does not reach the memory of another.

    folder: of the group alone. note: gets a line. cache: has tables that were measured before, of which the leader's
    counts; None: it is measured now.
    """
    before = ""
    try:
        memory = PeerMemory(group, group.device, HALF_BYTES)
    except OSError as e:
        note(f"sums of ranks: NCCL, because a GPU does not reach the memory of another: {e}")
        return None
    if group.shares_gpu:  # nothing there is worth a measurement
        sums = PeerSums(memory, None, same_way(SumWay.ONE_STEP, memory.buffers.one_step_bytes()))
    elif in_order and group.size > 2:  # there is one way
        sums = SumMeasurement(group, memory, None, width, dtype).in_order()
    else:
        key = SumKey(group.size, width, str(dtype).removeprefix("torch."))
        known = None if cache is None else _known(group, cache, key)
        if known is None:
            sums = SumMeasurement(group, memory, _share_memory(group, folder), width, dtype).quickest()
            if cache is not None and group.is_leader:
                cache.keep(key, sums.table)
        else:
            shares = SumWay.SYMMETRIC_MEMORY in known.alone
            sums, before = PeerSums(memory, _share_memory(group, folder) if shares else None, known), KNOWN
            _load_kernels(group, sums, width, dtype)
    note(f"{sums.describe()}{before}")
    return sums


def _load_kernels(group: RankGroup, sums: PeerSums, width: int, dtype: torch.dtype) -> None:
    """Collective. Runs each kernel of a table, as a measurement does: none is loaded while a graph is captured.

    Nor does the transport connect ranks there, which it does at its first sum of a size.
    """
    for num_bytes in SIZES:
        part = _rows(num_bytes, width, dtype, group.device)
        group.sum(part)
        sums.sum(part)
        sums.sum_add_rms_norm(part, torch.zeros_like(part), torch.ones_like(part[0]), EPS)


def _rows(num_bytes: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(max(num_bytes // (width * dtype.itemsize), 1), width, dtype=dtype, device=device)


def _known(group: RankGroup, cache: SumCache, key: SumKey) -> SumTable | None:
    """Collective. Returns the table that the leader has measured at an earlier start."""
    found = cache.find(key) if group.is_leader else None
    is_known = torch.tensor([found is not None], dtype=torch.int64, device=group.device)
    group.copy_from_leader(is_known)
    return _leaders(group, found or NOT_MEASURED) if is_known.item() else None


def _leaders(group: RankGroup, table: SumTable) -> SumTable:
    """Collective. Returns the leader's table."""
    words = torch.tensor(table.encode(), device=group.device)
    group.copy_from_leader(words)
    return decode_table(words.tolist())


def _share_memory(group: RankGroup, folder: Path) -> SymmetricSums | None:
    """Returns torch's sums, if all ranks can share memory in this way."""
    found = None
    try:
        found = SymmetricSums(group.shard, folder, group.device, SIZES[-1])
    except RuntimeError as e:
        log.info("no symmetric memory: %s", str(e).splitlines()[0])
    return found if group.least(int(found is not None)) else None


def _time(group: RankGroup, call: Call, device: torch.device) -> float:
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
