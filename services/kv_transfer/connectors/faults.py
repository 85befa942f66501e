"""Faults of `--pd-faults`, for tests: copies that fail, come late, or arrive with a wrong bit."""

import random
import time
from collections.abc import Callable

import torch
from torch import Tensor

from blockyard.services.kv_transfer.arena import Arena
from blockyard.services.kv_transfer.connectors.interface import (
    BlockReader,
    BlockWriter,
    Landed,
    LandingFailed,
    LinkLost,
    WriteFailed,
    Written,
)
from blockyard.services.kv_transfer.connectors.nixl_access import NixlReader
from blockyard.services.kv_transfer.layout import BlockLayout, LayoutPart
from blockyard.services.kv_transfer.protocol.incoming import Landing
from blockyard.services.kv_transfer.protocol.outgoing import BlockWrite
from blockyard.shared.config.services.worker import KVTransferFaults


class FaultyWriter:
    """A `BlockWriter` that loses and delays copies of another one. A delay holds up all later copies of the link."""

    def __init__(self, writer: BlockWriter, faults: KVTransferFaults, rng: random.Random) -> None:
        self.name, self.chunk_bytes, self.maps_memory = writer.name, writer.chunk_bytes, writer.maps_memory
        self._writer, self._faults, self._rng = writer, faults, rng
        self._next: BlockWrite | None = None  # the copy that waits
        self._due_s = 0.0
        self._is_lost = False

    def open(self, opened: Callable[[], None], lost: LinkLost) -> None:
        self._writer.open(opened, lost)

    def try_start(self, write: BlockWrite, written: Written, failed: WriteFailed) -> bool:
        now = time.monotonic()
        if write is not self._next:
            self._next, self._due_s = write, now + self._rng.uniform(0, self._faults.delay_ms / 1000)
            self._is_lost = self._rng.random() < self._faults.drop
        if now < self._due_s:
            return False
        if self._is_lost:
            failed(write, "lost by --pd-faults")
            return True
        return self._writer.try_start(write, written, failed)

    def free(self, place: bytes) -> None:
        self._writer.free(place)

    def close(self) -> None:
        self._writer.close()

    def join(self) -> None:
        self._writer.join()


class FaultyReader:
    """A `BlockReader` that inverts one bit of some copies, before another one computes their checksums."""

    def __init__(
        self, reader: BlockReader, faults: KVTransferFaults, rng: random.Random, arena: Arena, layout: BlockLayout,
        part: LayoutPart | None = None,
    ) -> None:  # fmt: skip
        """layout: of the arena. part: that comes over the link; None: all."""
        self.has_payloads = reader.has_payloads
        self._reader, self._faults, self._rng = reader, faults, rng
        self._arena, self._layout, self._part = arena, layout, part or layout.part or layout.whole

    def start(self, landing: Landing, payload: memoryview | None, landed: Landed, failed: LandingFailed) -> None:
        if self._rng.random() < self._faults.flip:
            if isinstance(self._reader, NixlReader):
                packed = self._reader.packed(landing, payload)
                if packed is not None:
                    self._flip(packed)
            elif payload is None:
                self._flip_in_arena(landing)
            else:
                changed = bytearray(payload)
                changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
                payload = memoryview(changed)
        self._reader.start(landing, payload, landed, failed)

    def _flip_in_arena(self, landing: Landing) -> None:
        """The sender has written to the arena already."""
        num_blocks = self._arena.bytes.numel() // self._layout.block_bytes
        section, one = next(pair for pair in self._layout.cut(self._part) if landing.layers.start in pair[1].layers)
        layer, block = self._rng.choice(section.local(landing.layers)), self._rng.choice(landing.targets)
        plane, head = self._rng.randrange(section.planes), self._rng.choice(one.heads) - section.heads.start
        start = num_blocks * section.bytes_before + (layer * num_blocks + block) * section.piece_bytes
        start += (plane * len(section.heads) + head) * section.head_bytes
        self._flip(self._arena.bytes[start : start + section.head_bytes])

    @torch.inference_mode()
    def _flip(self, memory: Tensor) -> None:
        """memory [n] uint8"""
        at = self._rng.randrange(memory.numel())
        memory[at] = int(memory[at]) ^ 1 << self._rng.randrange(8)
        int(memory[at])  # waits for a GPU, which reads it on another stream
