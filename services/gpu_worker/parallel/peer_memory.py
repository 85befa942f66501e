"""Buffers through which the kernels of the ranks of a host exchange parts of sums, mapped through CUDA IPC."""

import torch
from torch import Tensor

from blockyard.kernels.all_reduce.peer_buffers import PeerBuffers, empty_buffer, make_buffers
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.kv_transfer.arena import own_pool
from blockyard.services.kv_transfer.device.ipc_memory import HANDLE_BYTES, CudaDriver, MappedMemory, cuda_driver
from blockyard.shared.errors import RankLostError

OFFSET_BYTES = 8


class PeerMemory:
    """Owns this rank's buffer, and the mappings of those of the other ranks."""

    def __init__(self, group: RankGroup, device: torch.device, half_bytes: int) -> None:
        """Collective. Raises OSError on all ranks if one of them cannot map the memory of another."""
        self.device = device
        with own_pool() as self._pool:  # other ranks map the whole allocation
            self._own = empty_buffer(half_bytes, device)
        self._mapped: list[MappedMemory] = []
        addresses, refused = [self._own.data_ptr()] * group.size, ""
        try:
            driver = cuda_driver()
            place = _place_of(driver, self._own)
        except OSError as e:
            place, refused = bytes(HANDLE_BYTES + OFFSET_BYTES), str(e)
        mine = torch.frombuffer(bytearray(place), dtype=torch.uint8).to(group.device)
        places = [bytes(one.tolist()) for one in group.collect(mine)]
        for rank, place in enumerate(places):
            if rank == group.rank or refused:
                continue
            try:
                self._mapped.append(MappedMemory(driver, place[:HANDLE_BYTES]))
            except OSError as e:
                refused = str(e)
                continue
            addresses[rank] = self._mapped[-1].address + int.from_bytes(place[HANDLE_BYTES:], "little")
        torch.cuda.synchronize(device)  # the buffer is filled before another rank writes to it
        if not group.least(0 if refused else 1):
            self._mapped.clear()
            raise OSError(refused or "another rank cannot map this rank's memory")
        self.buffers: PeerBuffers = make_buffers(group.rank, addresses, half_bytes, device)

    def check(self) -> None:
        """Raises RankLostError if a kernel has given up waiting for another rank."""
        if self.buffers.reported[0]:
            raise RankLostError(f"rank {self.buffers.rank} did not get the part of a sum that another rank has to send")


def _place_of(driver: CudaDriver, buffer: Tensor) -> bytes:
    """Returns the handle of a tensor's allocation, and its offset there."""
    address = buffer.data_ptr()
    return driver.export(address) + (address - driver.start_of(address)).to_bytes(OFFSET_BYTES, "little")
