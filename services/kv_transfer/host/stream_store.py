"""KV blocks in pinned host memory, copied while the GPU computes. Imported only on a GPU.

A save packs blocks on the device, which takes microseconds and is all that the next step waits for. The packed blocks
are copied to the host on a second stream. A fetch copies packed blocks to the device and scatters them on a third
stream. Adjacent host blocks are one copy.
"""

import mmap
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.kv_cache.move_blocks import gather_blocks, scatter_blocks
from blockyard.services.kv_transfer.host.host_store import NUM_PARTS, STAGING_BYTES, as_bytes
from blockyard.shared.errors import LoadError


class StagingBuffer:
    """A device buffer for the packed blocks of a save."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self.full, self.empty = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]


class StreamStore:
    """A `BlockStore`. Calls return before their copies are complete; CUDA events order them with the calling stream."""

    def __init__(self, memory: Tensor, num_host_blocks: int, staging_bytes: int = STAGING_BYTES) -> None:
        """memory [layers, num_blocks, ...], contiguous, of any dtype. staging_bytes: of the device, for packed blocks.

        Raises LoadError if none can be pinned.
        """
        self._memory = as_bytes(memory).view(torch.int32)
        layers, _, words = self._memory.shape
        device = memory.device
        self._host = pinned(num_host_blocks * layers * words * 4).view(torch.int32).view(-1, layers, words)
        self._per_part = max(1, staging_bytes // (NUM_PARTS + 1) // (layers * words * 4))
        size = (self._per_part, layers, words)
        self._parts = [StagingBuffer(torch.empty(size, dtype=torch.int32, device=device)) for _ in range(NUM_PARTS)]
        self._next = 0
        self._incoming = torch.empty(size, dtype=torch.int32, device=device)
        self._pack, self._down, self._up = _streams(device)
        self._packed, self._saved, self._fetched = _events()
        self._saving: set[int] = set()  # host blocks with copies in flight
        torch.cuda.synchronize(device)  # every stream sees the initialized pool

    def save(self, blocks: list[int], hosts: list[int]) -> None:
        for part_blocks, part_hosts in self._in_parts(blocks, hosts):
            part = self._parts[self._next]
            self._next = (self._next + 1) % NUM_PARTS
            packed = part.buffer[: len(part_blocks)]
            with torch.inference_mode(), torch.cuda.stream(self._pack):
                self._pack.wait_event(part.empty)
                gather_blocks(self._memory, self._ids(part_blocks), packed)
                part.full.record(self._pack)
            with torch.inference_mode(), torch.cuda.stream(self._down):
                self._down.wait_event(part.full)
                for first, host, count in adjacent(part_hosts):
                    self._host[host : host + count].copy_(packed[first : first + count], non_blocking=True)
                part.empty.record(self._down)
        self._packed.record(self._pack)
        torch.cuda.current_stream(self._memory.device).wait_event(self._packed)
        if self._saved.query():  # type: ignore[no-untyped-call]
            self._saving.clear()
        self._saving.update(hosts)
        self._saved.record(self._down)

    def fetch(self, hosts: list[int], blocks: list[int]) -> None:
        self._up.wait_event(self._packed)  # a save may still read these blocks
        if not self._saving.isdisjoint(hosts):
            self._up.wait_event(self._saved)
        with torch.inference_mode(), torch.cuda.stream(self._up):
            for part_blocks, part_hosts in self._in_parts(blocks, hosts):
                packed = self._incoming[: len(part_blocks)]
                for first, host, count in adjacent(part_hosts):
                    packed[first : first + count].copy_(self._host[host : host + count], non_blocking=True)
                scatter_blocks(self._memory, self._ids(part_blocks), packed)
            self._fetched.record(self._up)
        torch.cuda.current_stream(self._memory.device).wait_event(self._fetched)

    def drain(self) -> None:
        torch.cuda.synchronize(self._memory.device)

    def _in_parts(self, blocks: list[int], hosts: list[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Pairs in the order of the host blocks, in parts that fit a buffer."""
        pairs = sorted(zip(hosts, blocks, strict=True))
        for start in range(0, len(pairs), self._per_part):
            part = pairs[start : start + self._per_part]
            yield [block for _, block in part], [host for host, _ in part]

    def _ids(self, blocks: list[int]) -> Tensor:
        ids = torch.tensor(blocks, dtype=torch.int32).pin_memory()
        return ids.to(self._memory.device, non_blocking=True)


def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(3)]  # type: ignore[no-untyped-call]


def _events() -> list[torch.cuda.Event]:
    return [torch.cuda.Event() for _ in range(3)]  # type: ignore[no-untyped-call]


def adjacent(hosts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive host blocks: index in the list, first block, length."""
    start = 0
    for i in range(1, len(hosts) + 1):
        if i == len(hosts) or hosts[i] != hosts[i - 1] + 1:
            yield start, hosts[start], i - start
            start = i


def pinned(num_bytes: int) -> Tensor:
    """Pinned host memory. torch's own pinned allocation would round the size up to a power of 2."""
    # Pages of its own: the driver pins whole pages, and refuses one that it has pinned for another allocation.
    memory = np.frombuffer(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(memory.ctypes.data, num_bytes, 0)
    if int(error) != 0:
        raise LoadError(
            f"{num_bytes / 2**30:.2f} GiB of host memory cannot be pinned ({error}): lower --swap-space, or raise the "
            "limit of locked memory (ulimit -l)"
        )
    # must run before the memory is freed, or the driver would treat the next mapping there as pinned
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.ctypes.data).atexit = False
    return torch.from_numpy(memory)
