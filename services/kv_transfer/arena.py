"""The memory of a worker's KV blocks. Other workers of the same host can map it.

A `HostArena` is a memfd, mapped shared. It has no name in a file system, and Linux frees its pages when the last
process unmaps it. Its size is sealed, so a process that has mapped it can still access it safely after the owner has
died. `drop` maps a new memfd at the same address. A process that has mapped the old memfd can still write to it, but
the owner no longer reads that memory.

A `DeviceArena` is an allocation on a GPU, exported through CUDA IPC. It too stays in memory until the last process has
unmapped it, so senders must unmap a dropped one: they do when their links to its receiver close.
"""

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockyard.services.kv_transfer.device.ipc_memory import MappedMemory, cuda_driver
from blockyard.services.kv_transfer.device.stream_copies import CudaStream
from blockyard.services.kv_transfer.protocol.frames import ArenaHandle, DeviceArenaHandle, HostArenaHandle

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

NONCE_BYTES = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # <linux/mman.h>; Python's mmap cannot map at an address
_PROT_NONE, _MAP_FAILED = 0, 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


@dataclass(frozen=True, slots=True)
class StagingRules:
    """How a worker allocates buffers for packed blocks: see `staging.StagingMemory`."""

    limit_bytes: int  # of all links of a worker
    buffer_bytes: int
    keeps_free: bool  # a buffer that a link gives back is kept for the next link, because freeing it may take long


# buffers of a GPU take 0.2 ms over NVLink: large, because the calls and frames of a copy take about 1 ms
GPU_STAGING = StagingRules(1 << 30, 64 << 20, keeps_free=True)  # the limit is part of the memory plan
HOST_STAGING = StagingRules(256 << 20, 4 << 20, keeps_free=False)


class Arena(Protocol):
    """The memory of all KV blocks of a worker, all zeros at first."""

    @property
    def bytes(self) -> Tensor:
        """[num_bytes] uint8. Views of it stay valid over `drop` and `restore`."""

    @property
    def gpu(self) -> int | None:
        """Index of the GPU that has the memory; None: it is host memory."""

    @property
    def staging(self) -> StagingRules:
        """Rules for buffers of packed blocks beside this memory."""

    @property
    def generation(self) -> int:
        """Starts at 1. It rises with each `drop`, because the blocks then are in other memory."""

    def renumber(self, at_least: int) -> None:
        """Raises `generation` to at least this: the arena follows another one of the same worker."""

    def export(self, incarnation: int) -> ArenaHandle | None:
        """Returns a handle with which processes of this host can map the memory; None if they cannot."""

    def expose(self) -> int:
        """Returns an address of the memory for processes that write to addresses of this one. Call `hide` in the end.

        It stays the same memory after `drop`, and no other memory gets the address, also not after `hide`.
        """

    def hide(self, address: int) -> None:
        """Makes accesses to an address of `expose` fail."""

    def drop(self) -> None:
        """Frees the memory. No copy may be in flight in this process. Do not use the arena before `restore`."""

    def restore(self) -> None:
        """Allocates the memory again after `drop`, all zeros."""

    def allocate_beside(self, num_bytes: int) -> "Arena":
        """Allocates another arena on the same device, without a wait for steps in flight."""


def make_arena(num_bytes: int, device: torch.device) -> Arena:
    """Allocates num_bytes of zeros on a device."""
    return HostArena(num_bytes) if device.type == "cpu" else DeviceArena(num_bytes, device)


class DeviceArena:
    """An `Arena` on a GPU: one allocation of torch. After `restore` it is at another address.

    No other tensor shares its allocation or gets it after `drop`, because a sender may write to it until its link has
    closed.
    """

    staging = GPU_STAGING

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        with own_pool() as self._pool:
            self._memory = torch.empty(num_bytes + NONCE_BYTES, dtype=torch.uint8, device=device)
        self.bytes = self._memory[:num_bytes]
        self.generation = 1
        self._nonce = b""
        self._clear()

    def renumber(self, at_least: int) -> None:
        self.generation = max(self.generation, at_least)

    def export(self, incarnation: int) -> DeviceArenaHandle | None:
        driver, address, num_bytes = cuda_driver(), self._memory.data_ptr(), self.bytes.numel()
        try:
            start, handle = driver.start_of(address), driver.export(address)
        except OSError as e:
            log.warning(
                "KV blocks arrive over tcp, the KV memory of this GPU cannot be shared: %s. PYTORCH_CUDA_ALLOC_CONF "
                "must not have expandable_segments:True",
                e,
            )
            return None
        return DeviceArenaHandle(handle, address - start, num_bytes, incarnation, self.generation, self._nonce)

    def expose(self) -> int:
        return self._memory.data_ptr()

    def hide(self, address: int) -> None:
        """Does nothing: no process can write to addresses of a GPU's memory by itself."""

    def drop(self) -> None:
        self.generation += 1
        self._memory.untyped_storage().resize_(0)
        self._pool = None
        torch.cuda.empty_cache()  # gives the memory of the pool back to the driver

    def restore(self) -> None:
        with own_pool() as self._pool:
            self._memory.untyped_storage().resize_(self._memory.numel())
        self._clear()

    def allocate_beside(self, num_bytes: int) -> "DeviceArena":
        device = self._memory.device
        with CudaStream(device).use():
            # an arena waits for its first zeros, here without the steps in flight
            return DeviceArena(num_bytes, device)

    @property
    def gpu(self) -> int | None:
        return self._memory.device.index

    @torch.inference_mode()
    def _clear(self) -> None:
        """Writes zeros, and a new nonce behind the blocks."""
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._memory.zero_()
        self._memory[self.bytes.numel() :] = torch.frombuffer(bytearray(self._nonce), dtype=torch.uint8)


@contextlib.contextmanager
def own_pool() -> Iterator[torch.cuda.MemPool | None]:
    """Allocations in this context are in a memory pool of their own, which lives as long as the context's value."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        yield pool


class HostArena:
    """An `Arena` in host memory, at one address for its whole life. Linux allocates its pages at first use."""

    gpu = None
    staging = HOST_STAGING

    def __init__(self, num_bytes: int) -> None:
        self.generation = 1
        self._num_bytes, self._size = num_bytes, mapped_size(num_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._region = mmap.mmap(-1, self._size, flags)  # reserves the address, and unmaps it with the last view
        self._address = np.frombuffer(self._region, np.uint8).ctypes.data
        self._nonce = b""
        self._fd = self._map_new()
        self._close = weakref.finalize(self, os.close, self._fd)
        self.bytes = torch.from_numpy(np.frombuffer(self._region, np.uint8, num_bytes))

    def renumber(self, at_least: int) -> None:
        self.generation = max(self.generation, at_least)

    def export(self, incarnation: int) -> HostArenaHandle | None:
        return HostArenaHandle(os.getpid(), self._fd, self._num_bytes, incarnation, self.generation, self._nonce)

    def expose(self) -> int:
        """The blocks' own address would lead to the blocks of a later generation after `drop`."""
        return self._map(None, self._fd, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)

    def hide(self, address: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._map(address, -1, _PROT_NONE, flags)

    def drop(self) -> None:
        self.generation += 1
        self._close.detach()
        # frees the pages now: closing the file would not while another process maps it
        if _libc.fallocate(self._fd, _PUNCH_HOLE, 0, self._size):
            raise OSError(ctypes.get_errno(), "fallocate of the KV memory")
        os.close(self._fd)
        self._fd = self._map_new()
        self._close = weakref.finalize(self, os.close, self._fd)

    def restore(self) -> None:
        """Does nothing: `drop` has already mapped new memory, and Linux allocates its pages at first use."""

    def allocate_beside(self, num_bytes: int) -> "HostArena":
        return HostArena(num_bytes)

    def _map_new(self) -> int:
        """Maps a new memfd at the arena's address, with a new nonce. Returns its file descriptor."""
        fd = os.memfd_create("blockyard-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, self._size)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        os.pwrite(fd, self._nonce, self._size - NONCE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        self._map(self._address, fd, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED)
        return fd

    def _map(self, address: int | None, fd: int, protection: int, flags: int) -> int:
        """Maps the arena's size. Returns the address."""
        found: int = _libc.mmap(address, self._size, protection, flags, fd, 0)
        if found == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), f"mmap of {self._size} bytes of KV memory")
        return found


def map_arena(handle: HostArenaHandle) -> Bytes:
    """Maps another process's arena: [num_bytes] uint8. The last view unmaps it.

    Raises OSError if this process cannot open the memfd, ValueError if it is not the one that the handle names.
    """
    fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        if size != mapped_size(handle.num_bytes) or not seals & fcntl.F_SEAL_SHRINK:
            raise ValueError(f"the memory has {size} bytes and seals {seals:#x}, not an arena of {handle.num_bytes}")
        nonce = os.pread(fd, NONCE_BYTES, size - NONCE_BYTES)
        if nonce != handle.nonce:
            raise ValueError(f"other memory is at /proc/{handle.pid}/fd/{handle.fd} than the handle names")
        return np.frombuffer(mmap.mmap(fd, size), np.uint8, handle.num_bytes)
    finally:
        os.close(fd)


def map_device_arena(handle: DeviceArenaHandle) -> MappedMemory:
    """Maps another process's arena on a GPU.

    Raises OSError if this process cannot open the memory, ValueError if it is not the one that the handle names.
    """
    driver = cuda_driver()
    mapped = MappedMemory(driver, handle.ipc)
    nonce = driver.read(mapped.address + handle.offset + handle.num_bytes, NONCE_BYTES)
    if nonce != handle.nonce:
        raise ValueError("the CUDA IPC handle opens other memory than it names")
    return mapped


def mapped_size(num_bytes: int) -> int:
    """Bytes of a memfd: the blocks, rounded up to whole pages, and one page for the nonce."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE + mmap.PAGESIZE
