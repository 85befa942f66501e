"""Sums over the ranks of a host beside NCCL, where a table says that they are quicker. Imports Triton."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from blockyard.kernels.all_reduce.row_tiles import FLAT_TILE, LONGEST_ROW
from blockyard.kernels.all_reduce.sum_ranks import DTYPES, fits, sum_add_rms_norm, sum_ranks
from blockyard.kernels.int_math import ceil_div
from blockyard.services.gpu_worker.parallel.peer_memory import PeerMemory
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.sums.sum_table import SumTable, SumWay

HALF_BYTES = 32 << 20  # of a buffer: two ranks sum 16 MiB at a time, four ranks 8 MiB in one step
SYMMETRIC_BYTES = 16  # a part has a multiple
SYMMETRIC_DTYPES = (torch.bfloat16, torch.float32)  # torch's kernel has no other that models have

_dist: Any = dist
_c10d: Any = _distributed_c10d  # the interface in Python needs torch's global process groups


class SymmetricSums:
    """Sums by torch's own kernel over its symmetric memory, to which parts are copied."""

    def __init__(self, shard: Shard, folder: Path, device: torch.device, num_bytes: int) -> None:
        """Collective. folder: of all ranks of the group alone. Raises RuntimeError where torch cannot share memory."""
        self._name, self.num_bytes = f"symmetric sums {folder}", num_bytes
        store = _dist.FileStore(str(folder / "symmetric"), shard.size)
        self._group = _dist.ProcessGroup(store, shard.rank, shard.size)  # torch finds the store by its name
        self._group._set_group_name(self._name)
        _c10d._register_process_group(self._name, self._group)
        memory = _c10d._SymmetricMemory
        memory.set_group_info(self._name, shard.rank, shard.size, store)
        self._own: Tensor = memory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device, self._name)
        self._mapped = memory.rendezvous(self._own)

    def takes(self, part: Tensor) -> bool:
        num_bytes = part.numel() * part.itemsize
        return part.dtype in SYMMETRIC_DTYPES and 0 < num_bytes <= self.num_bytes and num_bytes % SYMMETRIC_BYTES == 0

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of all ranks' parts, for which `takes` is True."""
        own = self._own[: part.numel() * part.itemsize].view(part.dtype)
        own.copy_(part.reshape(-1))
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(own, "sum", self._name)
        return total.view(part.shape)


class PeerSums:
    """Implements `SumKernels` with buffers that all ranks write to."""

    def __init__(self, memory: PeerMemory, symmetric: SymmetricSums | None, table: SumTable) -> None:
        """symmetric: None if torch cannot share memory. table: the same on all ranks."""
        self._memory, self._symmetric, self.table = memory, symmetric, table

    def way(self, part: Tensor, *, has_norm: bool) -> SumWay:
        """The table's way for a part, or the transport if that way does not take it."""
        way = self.table.way(part.numel() * part.itemsize, has_norm=has_norm)
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
        return self.table.describe()

    def check(self) -> None:
        self._memory.check()
