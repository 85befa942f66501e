"""Sums over the ranks of a host by kernels, where a table says that they are quicker than NCCL. Imports Triton."""

from torch import Tensor

from blockyard.kernels.all_reduce.row_tiles import FLAT_TILE, LONGEST_ROW
from blockyard.kernels.all_reduce.sum_ranks import DTYPES, fits, sum_add_rms_norm, sum_ranks
from blockyard.kernels.int_math import ceil_div
from blockyard.services.gpu_worker.parallel.peer_memory import PeerMemory
from blockyard.services.gpu_worker.parallel.sum_table import SumTable, SumWay
from blockyard.services.gpu_worker.parallel.symmetric_sums import SymmetricSums

HALF_BYTES = 32 << 20  # of a buffer: two ranks sum 16 MiB at a time, four ranks 8 MiB in one step


class PeerSums:
    """Implements `SumKernels` with buffers that all ranks write to."""

    def __init__(self, memory: PeerMemory, symmetric: SymmetricSums | None, table: SumTable) -> None:
        """symmetric: None if torch cannot share memory. table: the same on all ranks."""
        self._memory, self._symmetric, self._table = memory, symmetric, table

    def way(self, part: Tensor, *, has_norm: bool) -> SumWay:
        """The table's way for a part, or the transport if that way does not take it."""
        way = self._table.way(part.numel() * part.itemsize, has_norm=has_norm)
        if way is SumWay.SYMMETRIC_MEMORY:
            takes = not has_norm and self._symmetric is not None and self._symmetric.takes(part)
        else:
            row = part.shape[-1] if has_norm else FLAT_TILE
            num_rows, two_steps = ceil_div(part.numel(), row), way is SumWay.TWO_STEPS
            takes = num_rows > 0 and row <= LONGEST_ROW and part.dtype in DTYPES
            takes = takes and fits(num_rows, row * part.itemsize, self._memory.buffers, two_steps)
        return way if takes else SumWay.TRANSPORT

    def sum(self, part: Tensor) -> Tensor | None:
        match self.way(part, has_norm=False):
            case SumWay.TRANSPORT:
                return None
            case SumWay.SYMMETRIC_MEMORY:
                assert self._symmetric is not None
                return self._symmetric.sum(part)
            case way:
                return sum_ranks(part.contiguous(), self._memory.buffers, way is SumWay.TWO_STEPS)

    def sum_add_rms_norm(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor | None = None
    ) -> Tensor | None:
        way = self.way(part, has_norm=True)
        if way not in (SumWay.ONE_STEP, SumWay.TWO_STEPS):
            return None
        buffers, two_steps = self._memory.buffers, way is SumWay.TWO_STEPS
        return sum_add_rms_norm(part.contiguous(), residual, weight, eps, buffers, total, two_steps)

    def describe(self) -> str:
        return self._table.describe()

    def check(self) -> None:
        self._memory.check()
