"""The blocks of a `DeviceArena` for connectors. Imports Triton: only on a GPU."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.kv_cache.block_checksum import multipliers, salts
from blockyard.kernels.kv_cache.block_checksum_triton import block_checksums
from blockyard.kernels.kv_cache.copy_blocks import Memory, copy_blocks
from blockyard.services.kv_transfer.arena import map_device_arena
from blockyard.services.kv_transfer.block_memory import Copied, CopyFailed, PeerBlocks
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.device.ipc_memory import MappedBlocks
from blockyard.services.kv_transfer.device.stream_copies import CudaStream, StreamCopies
from blockyard.services.kv_transfer.host_blocks import Words
from blockyard.services.kv_transfer.layout import BlockLayout
from blockyard.services.kv_transfer.protocol.frames import ArenaHandle, DeviceArenaHandle

PROGRAMS = 32  # multiprocessors of a copy: enough for nine tenths of NVLink's rate, and steps go on beside it
HOST_PROGRAMS = 8  # of a copy to or from host memory
MAX_STAGING = 4  # pinned buffers for received bytes


@dataclass(frozen=True, slots=True)
class _Unpack:
    """Received bytes that wait for a pinned buffer."""

    packed: memoryview
    targets: list[int]
    layers: range
    done: Copied
    failed: CopyFailed


class DeviceBlocks:
    """Blocks in GPU memory, a `BlockMemory`. Copies are kernels on a stream beside the steps.

    `write` does not wait for steps in flight: call it for blocks that a complete step has written.
    """

    connector = "cuda_ipc"
    chunk_bytes = 64 << 20  # 0.2 ms over NVLink

    def __init__(self, own: Tensor, layout: BlockLayout, thread: CopyThread, copies: StreamCopies) -> None:
        """own [num_bytes] uint8. Compiles the kernels, which takes some seconds the first time.

        Raises ValueError if `own` is not whole blocks of words of 8 bytes.
        """
        words, rest = divmod(layout.piece_bytes, 8)
        if rest or own.numel() % layout.block_bytes:
            raise ValueError(f"{own.numel()} bytes are not whole blocks of {layout.block_bytes} in words of 8 bytes")
        self._own = own.view(torch.int64).view(layout.num_layers, -1, words)
        self.num_blocks = self._own.shape[1]
        self._layout, self._thread, self._copies = layout, thread, copies
        self._pins = own.device.type == "cuda"
        self._waiting: deque[_Unpack] = deque()
        self._staging: list[Words] = []  # free pinned buffers
        self._num_staging = 0
        self._tables = copies.run(self._prepare)

    @property
    def busy(self) -> bool:
        return self._copies.num_open > 0

    def poll(self) -> None:
        self._thread.poll()
        self._copies.poll()

    def drain(self) -> None:
        self._thread.drain()
        while self.busy:
            self._copies.drain()
            self._thread.drain()  # a complete copy lets bytes that wait into its buffer

    def map_peer(self, handle: ArenaHandle) -> MappedBlocks:
        if not isinstance(handle, DeviceArenaHandle):
            raise ValueError("its KV memory is not on a GPU")
        if handle.num_bytes % self._layout.block_bytes:
            raise ValueError(f"{handle.num_bytes} bytes are not whole blocks of {self._layout.block_bytes}")
        layers, _, words = self._own.shape
        num_blocks = handle.num_bytes // self._layout.block_bytes
        return MappedBlocks(map_device_arena(handle), handle.offset, (layers, num_blocks, words))

    def write(
        self, sources: list[int], peer: PeerBlocks, targets: list[int], layers: range, done: Copied, failed: CopyFailed
    ) -> None:
        assert not isinstance(peer, np.ndarray)

        def launch() -> Tensor | None:
            ids = self._ids(sources, targets)
            return self._copy(self._own, peer, ids, layers, layers.start, PROGRAMS)

        self._copies.submit(launch, lambda sums: done(_words(sums)), failed)

    def make_buffer(self, num_bytes: int) -> Words:
        return torch.empty(num_bytes // 8, dtype=torch.int64, pin_memory=self._pins).numpy().view(np.uint64)

    def pack(self, sources: list[int], layers: range, packed: Words, done: Copied, failed: CopyFailed) -> None:
        def launch() -> Tensor | None:
            ids = self._ids(sources, range(len(sources)))
            return self._copy(self._own, torch.from_numpy(packed.view(np.int64)), ids, layers, 0, HOST_PROGRAMS)

        self._copies.submit(launch, lambda sums: done(_words(sums)), failed)

    def unpack(self, packed: memoryview, targets: list[int], layers: range, done: Copied, failed: CopyFailed) -> None:
        self._waiting.append(_Unpack(packed, targets, layers, done, failed))
        self._start_unpacks()

    def sum(self, ids: list[int], layers: range, done: Copied, failed: CopyFailed) -> None:
        if self._tables is None:
            done(None)
            return
        self._copies.submit(lambda: self._sums_of(self._ids(ids)[0], layers), lambda sums: done(_words(sums)), failed)

    def _start_unpacks(self) -> None:
        while self._waiting and (self._staging or self._num_staging < MAX_STAGING):
            it = self._waiting.popleft()
            self._start_unpack(it, self._staging_buffer(it.packed.nbytes))

    def _staging_buffer(self, num_bytes: int) -> Words:
        if not self._staging:
            self._num_staging += 1
            return self.make_buffer(num_bytes)
        buffer = self._staging.pop()
        return buffer if buffer.nbytes >= num_bytes else self.make_buffer(num_bytes)

    def _start_unpack(self, it: _Unpack, buffer: Words) -> None:
        """Copies received bytes to pinned memory on the thread, and then to the device on the stream."""
        words = buffer[: it.packed.nbytes // 8]

        def launch() -> Tensor | None:
            source = torch.from_numpy(words.view(np.int64)).view(len(it.layers), len(it.targets), -1)
            ids = self._ids(range(len(it.targets)), it.targets)
            copy_blocks(source, self._own, ids, len(it.layers), 0, it.layers.start, programs=HOST_PROGRAMS)
            return None if self._tables is None else self._sums_of(ids[1], it.layers)

        def finish(end: Callable[[], None]) -> None:
            self._staging.append(buffer)
            end()
            self._start_unpacks()

        def failed(error: Exception) -> None:
            finish(lambda: it.failed(error))

        def scatter(_: None) -> None:
            self._copies.submit(launch, lambda sums: finish(lambda: it.done(_words(sums))), failed)

        self._thread.submit(lambda: np.copyto(words, np.frombuffer(it.packed, np.uint64)), scatter, failed)

    def _prepare(self) -> tuple[Tensor, Tensor] | None:
        """Returns multipliers and salts on the device. Runs all kernels once: they compile now, not in a transfer."""
        device, words = self._own.device, self._own.shape[2]
        block = torch.zeros((1, 1, words), dtype=torch.int64, device=device)
        ids = torch.zeros((2, 1), dtype=torch.int32, device=device)
        copy_blocks(block, block.clone(), ids, 1)
        if not self._layout.checksums:
            return None
        one, many, sums = multipliers(words).to(device), salts(self._layout.num_layers).to(device), block[0, 0, :1]
        copy_blocks(block, block.clone(), ids, 1, checksums=(one, many[:1], sums.clone()))
        block_checksums(block, ids[0], range(1), one, many[:1], sums.clone())
        return one, many

    def _ids(self, *rows: list[int] | range) -> Tensor:
        """[rows, n] int32 on the device."""
        ids = torch.tensor([list(row) for row in rows], dtype=torch.int32)
        return (ids.pin_memory() if self._pins else ids).to(self._own.device, non_blocking=True)

    def _copy(
        self, source: Tensor, target: Memory, ids: Tensor, layers: range, first_target_layer: int, programs: int
    ) -> Tensor | None:
        """Launches a copy of own blocks. Returns host memory that gets their checksums."""
        if self._tables is None:
            copy_blocks(source, target, ids, len(layers), layers.start, first_target_layer, programs=programs)
            return None
        sums = torch.zeros(ids.shape[1], dtype=torch.int64, device=ids.device)
        checksums = (*self._tables, sums)
        copy_blocks(source, target, ids, len(layers), layers.start, first_target_layer, checksums, programs)
        return self._to_host(sums)

    def _sums_of(self, ids: Tensor, layers: range) -> Tensor:
        assert self._tables is not None
        sums = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        block_checksums(self._own, ids, layers, *self._tables, sums)
        return self._to_host(sums)

    def _to_host(self, sums: Tensor) -> Tensor:
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=self._pins)
        return host.copy_(sums, non_blocking=True)


def open_blocks(memory: Tensor, layout: BlockLayout, thread: CopyThread) -> DeviceBlocks:
    """memory [num_bytes] uint8 on a GPU."""
    return DeviceBlocks(memory, layout, thread, StreamCopies(CudaStream(memory.device)))


def _words(sums: Tensor | None) -> Words | None:
    return None if sums is None else sums.numpy().view(np.uint64)
