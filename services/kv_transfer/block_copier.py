"""The blocks of this worker for connectors: one interface for host and GPU memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from torch import Tensor

from blockyard.services.kv_transfer.arena import Bytes, map_arena
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.device.ipc_memory import MappedBlocks
from blockyard.services.kv_transfer.host_copies import (
    Checksums,
    Ids,
    Words,
    blocks_of,
    blocks_of_part,
    copy_blocks,
    pack_blocks,
    unpack_blocks,
)
from blockyard.services.kv_transfer.layout import BlockLayout, LayoutPart, Section
from blockyard.services.kv_transfer.protocol.frames import ArenaHandle, HostArenaHandle

Copied = Callable[[Words | None], None]  # checksums [n] over the copied layers; None if checksums are off
CopyFailed = Callable[[Exception], None]

PeerBlocks = Sequence[Words] | Sequence[MappedBlocks]  # of another worker, mapped: as `blocks_of` or `blocks_of_part`


class BlockCopier(Protocol):
    """The KV blocks of one generation of an arena. Each copy ends in a call of `done` or `failed` by `poll`.

    Block ids must be in the pools, and the layers of one call in one section of the layout. Call the methods from one
    thread. None waits, except `drain`.
    """

    num_blocks: int
    connector: str  # that writes to mapped memory of this kind
    chunk_bytes: int  # of one copy to mapped memory

    def poll(self) -> None:
        """Reports complete copies. Call it when `CopyThread.descriptor` is readable, and all the time while
        `needs_polling`."""

    @property
    def needs_polling(self) -> bool:
        """Whether a GPU copies: no descriptor tells when it has finished. A copy takes less than a millisecond."""

    def drain(self) -> None:
        """Waits for all copies."""

    def map_peer(self, handle: ArenaHandle, theirs: LayoutPart | None) -> PeerBlocks:
        """Maps another worker's blocks; the last reference unmaps them. Raises OSError or ValueError if it cannot.

        theirs: what its rank has of the model.
        """

    def write(
        self, sources: list[int], peer: PeerBlocks, targets: list[int], layers: range, done: Copied, failed: CopyFailed
    ) -> None:
        """Copies blocks to mapped memory. `done` gets checksums of the source."""

    def make_buffer(self, num_bytes: int) -> Words:
        """Makes host memory for `pack`."""

    def pack(self, sources: list[int], layers: range, packed: Words, done: Copied, failed: CopyFailed) -> None:
        """Copies blocks into packed, of `make_buffer`: [len(layers), n, words] one after the other. `done` gets
        checksums of the source."""

    def unpack(self, packed: memoryview, targets: list[int], layers: range, done: Copied, failed: CopyFailed) -> None:
        """The reverse of `pack`. `done` gets checksums of the blocks in the arena. packed: any host memory."""

    def gather(self, sources: list[int], layers: range, packed: Tensor, done: Copied, failed: CopyFailed) -> None:
        """Packs into packed [num_bytes] uint8 of staging memory, of the same kind as the blocks': see `pack`."""

    def scatter(self, packed: Tensor, targets: list[int], layers: range, done: Copied, failed: CopyFailed) -> None:
        """The reverse of `gather`. `done` gets checksums of the blocks in the arena."""

    def sum(self, ids: list[int], layers: range, done: Copied, failed: CopyFailed) -> None:
        """Computes checksums. With checksums off, calls `done` at once."""


@dataclass(frozen=True, slots=True)
class _HostSection:
    """A section of the own arena."""

    section: Section
    own: Words
    checksums: Checksums | None


class HostCopier:
    """Blocks in host memory, a `BlockCopier`. Copies run on a `CopyThread`."""

    connector = "shm"
    chunk_bytes = 4 << 20  # small, because an aborted transfer waits for its copies in flight

    def __init__(self, own: Bytes, layout: BlockLayout, copies: CopyThread, part: LayoutPart | None = None) -> None:
        """own [num_bytes] uint8, of a rank with this layout. part: of it, that is copied; None: all.

        Raises ValueError as `blocks_of_part` does.
        """
        memory = blocks_of(own, layout) if part is None else blocks_of_part(own, layout, part)
        self._part, layout = part, layout if part is None else layout.of(part)
        self.num_blocks = memory[0].shape[1]
        self._layout, self._copies = layout, copies
        self._sections = [
            _HostSection(section, words, Checksums(section) if layout.checksums else None)
            for section, words in zip(layout.sections, memory, strict=True)
        ]

    def poll(self) -> None:
        self._copies.poll()

    @property
    def needs_polling(self) -> bool:
        return False

    def drain(self) -> None:
        self._copies.drain()

    def map_peer(self, handle: ArenaHandle, theirs: LayoutPart | None) -> list[Words]:
        if not isinstance(handle, HostArenaHandle):
            raise ValueError("its KV memory is on a GPU")
        memory, layout = map_arena(handle), self._layout.of(theirs)
        return blocks_of(memory, layout) if self._part is None else blocks_of_part(memory, layout, self._part)

    def write(
        self, sources: list[int], peer: PeerBlocks, targets: list[int], layers: range, done: Copied, failed: CopyFailed
    ) -> None:
        it, local = self._locate(layers)
        theirs = peer[it.section.index]
        assert isinstance(theirs, np.ndarray)
        ids = np.array(sources)
        copy = partial(copy_blocks, it.own, ids, theirs, np.array(targets), local)
        self._submit(it, copy, ids, local, done, failed)

    def make_buffer(self, num_bytes: int) -> Words:
        return np.empty(num_bytes // 8, np.uint64)

    def pack(self, sources: list[int], layers: range, packed: Words, done: Copied, failed: CopyFailed) -> None:
        (it, local), ids = self._locate(layers), np.array(sources)
        words = _packed(packed, it, len(layers), len(sources))

        def job() -> Words | None:
            pack_blocks(it.own, ids, local, words)
            return None if it.checksums is None else it.checksums.of_packed(words, local)

        self._copies.submit(job, done, failed)

    def unpack(self, packed: memoryview, targets: list[int], layers: range, done: Copied, failed: CopyFailed) -> None:
        (it, local), ids = self._locate(layers), np.array(targets)
        words = _packed(np.frombuffer(packed, np.uint64), it, len(layers), len(targets))
        self._submit(it, partial(unpack_blocks, words, it.own, ids, local), ids, local, done, failed)

    def gather(self, sources: list[int], layers: range, packed: Tensor, done: Copied, failed: CopyFailed) -> None:
        self.pack(sources, layers, packed.numpy().view(np.uint64), done, failed)

    def scatter(self, packed: Tensor, targets: list[int], layers: range, done: Copied, failed: CopyFailed) -> None:
        self.unpack(packed.numpy().data, targets, layers, done, failed)

    def sum(self, ids: list[int], layers: range, done: Copied, failed: CopyFailed) -> None:
        if not self._layout.checksums:
            done(None)
            return
        it, local = self._locate(layers)
        self._submit(it, lambda: None, np.array(ids), local, done, failed)

    def _locate(self, layers: range) -> tuple[_HostSection, range]:
        section = self._layout.section_of(layers)
        return self._sections[section.index], section.local(layers)

    def _submit(
        self, it: _HostSection, copy: Callable[[], None], ids: Ids, layers: range, done: Copied, failed: CopyFailed,
    ) -> None:  # fmt: skip
        """Runs a copy on the thread, then computes checksums of own blocks. layers: numbers in the section."""

        def job() -> Words | None:
            copy()
            return None if it.checksums is None else it.checksums.of_blocks(it.own, ids, layers)

        self._copies.submit(job, done, failed)


def _packed(words: Words, it: _HostSection, num_layers: int, num: int) -> Words:
    """words [layers * n * words of a piece], of any shape -> packed blocks, with the dimensions of the own ones."""
    return words.reshape(num_layers, num, *it.own.shape[2:])
