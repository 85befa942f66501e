"""The blocks of a `DeviceArena` for connectors. Imports Triton: only on a GPU."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from blockyard.kernels.kv_cache.block_checksum import multipliers, salts
from blockyard.kernels.kv_cache.block_checksum_triton import block_checksums
from blockyard.kernels.kv_cache.copy_blocks import Memory, copy_blocks
from blockyard.services.kv_transfer.arena import map_device_arena
from blockyard.services.kv_transfer.block_copier import Copied, CopyFailed, PeerBlocks
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.device.ipc_memory import MappedBlocks
from blockyard.services.kv_transfer.device.stream_copies import CudaStream, StreamCopies
from blockyard.services.kv_transfer.host_copies import Words
from blockyard.services.kv_transfer.layout import BlockLayout, LayoutPart, Section
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


class _CopyBuffers:
    """Block ids and checksums of one copy. Reused, because allocating pinned memory may take longer than a copy.

    Make it on the stream of the copies.
    """

    def __init__(self, device: torch.device, copies: StreamCopies, num_ids: int, num_sums: int) -> None:
        self._host_ids = copies.host_tensor(num_ids, torch.int32)
        self._ids = torch.empty(num_ids, dtype=torch.int32, device=device)
        self._sums = copies.host_tensor(num_sums, torch.int64)

    def fits(self, num_ids: int, num_sums: int) -> bool:
        return self._ids.numel() >= num_ids and self._sums.numel() >= num_sums

    def ids(self, *rows: list[int] | range) -> Tensor:
        """Sends ids to the device: [rows, n] int32."""
        count = len(rows) * len(rows[0])
        self._host_ids[:count].numpy().reshape(len(rows), -1)[:] = rows
        self._ids[:count].copy_(self._host_ids[:count], non_blocking=True)
        return self._ids[:count].view(len(rows), -1)

    def sums(self, num_layers: int, num: int) -> Tensor:
        """[num_layers, num] int64, in pinned memory: the device writes to it."""
        return self._sums[: num_layers * num].view(num_layers, num)


@dataclass(frozen=True, slots=True)
class _DeviceSection:
    """A section of the own arena."""

    section: Section
    own: Tensor  # see `copy_blocks.Memory`
    tables: tuple[Tensor, Tensor] | None  # multipliers and salts of checksums, None if they are off


class DeviceCopier:
    """Blocks in GPU memory, a `BlockCopier`. Copies are kernels on a stream beside the steps.

    `write` does not wait for steps in flight: call it for blocks that a complete step has written.
    """

    connector = "cuda_ipc"
    chunk_bytes = 256 << 20  # 0.7 ms over NVLink: large, because each copy costs both hosts some 0.1 ms

    def __init__(
        self,
        own: Tensor,
        layout: BlockLayout,
        thread: CopyThread,
        copies: StreamCopies,
        part: LayoutPart | None = None,
    ) -> None:
        """own [num_bytes] uint8, of a rank with this layout. part: of it, that is copied; None: all. Compiles the
        kernels, which takes some seconds the first time.

        Raises ValueError if `own` is not whole blocks of words of 8 bytes, or does not have the part.
        """
        self.num_blocks, rest = divmod(own.numel(), layout.block_bytes)
        if rest or any(section.piece_bytes % 8 for section in layout.sections):
            raise ValueError(f"{own.numel()} bytes are not whole blocks of {layout.block_bytes} in words of 8 bytes")
        self._device = own.device
        self._part, self._layout = part, layout if part is None else layout.of(part)
        self._thread, self._copies = thread, copies
        self._waiting: deque[_Unpack] = deque()
        self._staging: list[Words] = []  # free pinned buffers
        self._num_staging = 0
        self._buffers: list[_CopyBuffers] = []  # free ones
        views, words = views_of(layout, part, self.num_blocks), own.view(torch.int64)
        self._sections = copies.run(
            lambda: [
                self._prepare(section, words.as_strided(shape, strides, words.storage_offset() + first))
                for section, (first, shape, strides) in zip(self._layout.sections, views, strict=True)
            ]
        )

    def poll(self) -> None:
        self._thread.poll()
        self._copies.poll()

    @property
    def needs_polling(self) -> bool:
        return self._copies.in_flight > 0

    def drain(self) -> None:
        self._thread.drain()
        while self._copies.in_flight:
            self._copies.drain()
            self._thread.drain()

    def map_peer(self, handle: ArenaHandle, theirs: LayoutPart | None) -> list[MappedBlocks]:
        if not isinstance(handle, DeviceArenaHandle):
            raise ValueError("its KV memory is not on a GPU")
        layout = self._layout.of(theirs)
        if handle.num_bytes % layout.block_bytes:
            raise ValueError(f"{handle.num_bytes} bytes are not whole blocks of {layout.block_bytes}")
        views = views_of(layout, self._part, handle.num_bytes // layout.block_bytes)
        memory = map_device_arena(handle)
        found = [MappedBlocks(memory, handle.offset + 8 * first, shape, strides) for first, shape, strides in views]
        self._copies.run(lambda: self._compile_for(found))
        return found

    def _compile_for(self, theirs: Sequence[Memory]) -> None:
        """Compiles the copies to memory with other strides than the own now, and not in a transfer."""
        for it, other in zip(self._sections, theirs, strict=True):
            if it.own.stride()[1:] == other.stride()[1:]:
                continue
            buffers = _CopyBuffers(self._device, self._copies, 2, 1)
            checksums = None if it.tables is None else (it.tables[0], it.tables[1][:1], buffers.sums(1, 1))
            copy_blocks(self._block_like(it.own), self._block_like(other), buffers.ids([0], [0]), 1, 0, 0, checksums)

    def _block_like(self, memory: Memory) -> Tensor:
        """A block in one layer, with the strides of others."""
        _, size, *inner = memory.stride()
        block = torch.zeros(size, dtype=torch.int64, device=self._device)
        return block.as_strided((1, 1, *memory.shape[2:]), (size, size, *inner))

    def write(
        self, sources: list[int], peer: PeerBlocks, targets: list[int], layers: range, done: Copied, failed: CopyFailed
    ) -> None:
        it, local = self._locate(layers)
        theirs = peer[it.section.index]
        assert not isinstance(theirs, np.ndarray)
        self._copy_own(it, sources, theirs, targets, local, local.start, PROGRAMS, done, failed)

    def make_buffer(self, num_bytes: int) -> Words:
        return self._copies.host_tensor(num_bytes // 8, torch.int64).numpy().view(np.uint64)

    def pack(self, sources: list[int], layers: range, packed: Words, done: Copied, failed: CopyFailed) -> None:
        it, local = self._locate(layers)
        target = _packed(torch.from_numpy(packed.view(np.int64)), it, len(layers), len(sources))
        self._copy_own(it, sources, target, range(len(sources)), local, 0, HOST_PROGRAMS, done, failed)

    def unpack(self, packed: memoryview, targets: list[int], layers: range, done: Copied, failed: CopyFailed) -> None:
        self._waiting.append(_Unpack(packed, targets, layers, done, failed))
        self._start_unpacks()

    def gather(self, sources: list[int], layers: range, packed: Tensor, done: Copied, failed: CopyFailed) -> None:
        it, local = self._locate(layers)
        target = _packed(packed.view(torch.int64), it, len(layers), len(sources))
        self._copy_own(it, sources, target, range(len(sources)), local, 0, PROGRAMS, done, failed)

    def scatter(self, packed: Tensor, targets: list[int], layers: range, done: Copied, failed: CopyFailed) -> None:
        self._scatter(packed.view(torch.int64), targets, layers, PROGRAMS, done, failed)

    def sum(self, ids: list[int], layers: range, done: Copied, failed: CopyFailed) -> None:
        if not self._layout.checksums:
            done(None)
            return
        it, local = self._locate(layers)
        self._submit(1, ids, layers, lambda buffers: self._sum(it, buffers.ids(ids)[0], local, buffers), done, failed)

    def _locate(self, layers: range) -> tuple[_DeviceSection, range]:
        section = self._layout.section_of(layers)
        return self._sections[section.index], section.local(layers)

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
        source = torch.from_numpy(words.view(np.int64))

        def finish(end: Callable[[], None]) -> None:
            self._staging.append(buffer)
            end()
            self._start_unpacks()

        def failed(error: Exception) -> None:
            finish(lambda: it.failed(error))

        def scatter(_: None) -> None:
            self._scatter(
                source, it.targets, it.layers, HOST_PROGRAMS, lambda sums: finish(lambda: it.done(sums)), failed
            )

        self._thread.submit(lambda: np.copyto(words, np.frombuffer(it.packed, np.uint64)), scatter, failed)

    def _scatter(
        self, source: Tensor, targets: list[int], layers: range, programs: int, done: Copied, failed: CopyFailed
    ) -> None:
        """source [len(layers) * n * words of a piece] int64, packed."""
        to, local = self._locate(layers)
        source = _packed(source, to, len(layers), len(targets))

        def launch(buffers: _CopyBuffers) -> Tensor | None:
            ids = buffers.ids(range(len(targets)), targets)
            copy_blocks(source, to.own, ids, len(local), 0, local.start, programs=programs)
            return None if to.tables is None else self._sum(to, ids[1], local, buffers)

        self._submit(2, targets, layers, launch, done, failed)

    def _prepare(self, section: Section, own: Tensor) -> _DeviceSection:
        """Makes a section of the arena. Runs all kernels once: they compile now, not in a transfer."""
        device, words = self._device, section.piece_bytes // 8
        block, packed = self._block_like(own), torch.zeros((1, 1, *own.shape[2:]), dtype=torch.int64, device=device)
        ids = torch.zeros((2, 1), dtype=torch.int32, device=device)
        for source, target in ((block, packed), (packed, block), (block, self._block_like(own))):
            copy_blocks(source, target, ids, 1)
        if not self._layout.checksums:
            return _DeviceSection(section, own, None)
        one, many = multipliers(words).to(device), salts(section.layers.stop)[section.layers.start :].to(device)
        sums = _CopyBuffers(device, self._copies, 2, 1).sums(1, 1)
        copy_blocks(block, packed, ids, 1, checksums=(one, many[:1], sums))
        block_checksums(block, ids[0], range(1), one, many[:1], sums)
        return _DeviceSection(section, own, (one, many))

    def _copy_own(
        self, it: _DeviceSection, sources: list[int], target: Memory, targets: list[int] | range, layers: range,
        first_target_layer: int, programs: int, done: Copied, failed: CopyFailed,
    ) -> None:  # fmt: skip
        """Copies own blocks, with checksums. layers: numbers in the section."""

        def launch(buffers: _CopyBuffers) -> Tensor | None:
            ids = buffers.ids(sources, targets)
            sums = None if it.tables is None else buffers.sums(len(layers), len(sources))
            checksums = None if it.tables is None or sums is None else (*it.tables, sums)
            copy_blocks(it.own, target, ids, len(layers), layers.start, first_target_layer, checksums, programs)
            return sums

        self._submit(2, sources, layers, launch, done, failed)

    def _submit(
        self, num_rows: int, ids: list[int], layers: range, launch: Callable[[_CopyBuffers], Tensor | None],
        done: Copied, failed: CopyFailed,
    ) -> None:  # fmt: skip
        """Launches a copy with buffers for `num_rows` rows of ids and for a checksum of each block and layer."""
        num_ids, num_sums = num_rows * len(ids), len(layers) * len(ids)

        def launch_with_buffers() -> tuple[_CopyBuffers, Tensor | None]:
            # allocates on the side stream: memory of the steps' stream that torch counts as free may still be in use
            # by a step that runs
            buffers = self._buffers.pop() if self._buffers else None
            if buffers is None or not buffers.fits(num_ids, num_sums):
                buffers = _CopyBuffers(self._device, self._copies, num_ids, num_sums)
            return buffers, launch(buffers)

        def complete(launched: tuple[_CopyBuffers, Tensor | None]) -> None:
            buffers, sums = launched
            total: Words | None = None if sums is None else sums.numpy().view(np.uint64).sum(0)
            self._buffers.append(buffers)
            done(total)

        # buffers of a copy that has failed are not used again: the GPU may still write to them
        self._copies.submit(launch_with_buffers, complete, failed)

    def _sum(self, it: _DeviceSection, ids: Tensor, layers: range, buffers: _CopyBuffers) -> Tensor:
        assert it.tables is not None
        sums = buffers.sums(len(layers), len(ids))
        block_checksums(it.own, ids, layers, *it.tables, sums)
        return sums


def _packed(words: Tensor, it: _DeviceSection, num_layers: int, num: int) -> Tensor:
    """words [layers * n * words of a piece] int64 -> packed blocks, with the dimensions of the own ones."""
    return words.reshape(num_layers, num, *it.own.shape[2:])


def views_of(
    layout: BlockLayout, part: LayoutPart | None, num_blocks: int
) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Returns the first word, shape and strides of each section of a part, in memory of this layout: of blocks
    [layers, num_blocks, planes, words]. None: all of it, [layers, num_blocks, words]. Raises ValueError as
    `BlockLayout.cut` does."""
    found: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    if part is None:
        for section in layout.sections:
            size = section.piece_bytes // 8
            first, strides = num_blocks * section.bytes_before // 8, (num_blocks * size, size, 1)
            found.append((first, (len(section.layers), num_blocks, size), strides))
        return found
    for own, one in layout.cut(part):
        size, (head, stop) = own.piece_bytes // 8, own.head_words(one.heads)
        first = num_blocks * (own.bytes_before // 8 + own.local(one.layers).start * size) + head
        shape = (len(one.layers), num_blocks, own.planes, stop - head)
        found.append((first, shape, (num_blocks * size, size, size // own.planes, 1)))
    return found


def make_copier(memory: Tensor, layout: BlockLayout, thread: CopyThread, part: LayoutPart | None) -> DeviceCopier:
    """memory [num_bytes] uint8 on a GPU."""
    return DeviceCopier(memory, layout, thread, StreamCopies(CudaStream(memory.device)), part)
