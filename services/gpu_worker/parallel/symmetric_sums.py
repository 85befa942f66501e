"""Sums over the ranks of a host by torch's own kernel over its symmetric memory."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d

from blockyard.services.gpu_worker.parallel.shares import Shard

_dist: Any = dist
_c10d: Any = _distributed_c10d  # the interface in Python needs torch's global process groups

ALIGNMENT = 16  # bytes
DTYPES = (torch.bfloat16, torch.float32)  # the kernel has no other that models have


class SymmetricSums:
    """One rank's symmetric memory, to which parts are copied."""

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
        return part.dtype in DTYPES and 0 < num_bytes <= self.num_bytes and num_bytes % ALIGNMENT == 0

    def sum(self, part: Tensor) -> Tensor:
        """Returns the sum of all ranks' parts, for which `takes` is True."""
        own = self._own[: part.numel() * part.itemsize].view(part.dtype)
        own.copy_(part.reshape(-1))
        total: Tensor = torch.ops.symm_mem.one_shot_all_reduce(own, "sum", self._name)
        return total.view(part.shape)
