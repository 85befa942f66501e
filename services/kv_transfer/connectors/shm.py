"""Shared memory, for CPU workers of one host: the sender maps the receiver's arena and copies blocks into it.

If the receiver dies, a copy in flight completes safely, because the mapping keeps the memory. If the sender dies, it
may write until Linux has ended its process, and the receiver learns of that end from a pidfd. A broken link is no
proof that the sender stopped writing: both processes may live.
"""

import numpy as np

from blockyard.services.kv_transfer.connectors.interface import Landed, LandingFailed, WriteFailed, Written
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.host_blocks import Checksums, Words, copy_blocks
from blockyard.services.kv_transfer.protocol.incoming import Landing
from blockyard.services.kv_transfer.protocol.outgoing import BlockWrite

CHUNK_BYTES = 4 << 20  # small, because an aborted transfer waits for its copies in flight
MAX_IN_FLIGHT = 2  # one copy runs, the next one is queued


class ShmWriter:
    """Copies blocks into the mapped arena of a receiver on this host."""

    name = "shm"
    chunk_bytes = CHUNK_BYTES
    maps_memory = True

    def __init__(self, own: Words, theirs: Words, copies: CopyThread, checksums: Checksums | None) -> None:
        """own, theirs [layers, num_blocks, words]."""
        self._own, self._theirs, self._copies, self._checksums = own, theirs, copies, checksums
        self._in_flight = 0

    def try_start(self, write: BlockWrite, written: Written, failed: WriteFailed) -> bool:
        if self._in_flight >= MAX_IN_FLIGHT:
            return False
        own, theirs, checksums = self._own, self._theirs, self._checksums
        sources, targets = np.array(write.sources), np.array(write.targets)
        if (targets >= theirs.shape[1]).any() or (sources >= own.shape[1]).any():
            raise ValueError(f"blocks of transfer {write.number} are not in the pools")

        def job() -> Words | None:
            copy_blocks(own, sources, theirs, targets, write.layers)
            return None if checksums is None else checksums.of_blocks(own, sources, write.layers)

        def done(sums: Words | None) -> None:
            self._in_flight -= 1
            written(write, sums, None)

        def broke(error: Exception) -> None:
            self._in_flight -= 1
            failed(write, str(error))

        self._in_flight += 1
        self._copies.submit(job, done, broke)
        return True

    def close(self) -> None:
        self._theirs = self._theirs[:, :0].copy()  # a copy in flight keeps the mapping until it is complete


class ShmReader:
    """Computes checksums of blocks that the sender has already written into this worker's arena."""

    def __init__(self, own: Words, copies: CopyThread, checksums: Checksums | None) -> None:
        self._own, self._copies, self._checksums = own, copies, checksums

    def start(self, landing: Landing, payload: memoryview | None, landed: Landed, failed: LandingFailed) -> None:
        if self._checksums is None:
            landed(landing, None)
            return
        own, checksums, targets = self._own, self._checksums, np.array(landing.targets)
        self._copies.submit(
            lambda: checksums.of_blocks(own, targets, landing.layers),
            lambda sums: landed(landing, sums),
            lambda error: failed(landing, str(error)),
        )
