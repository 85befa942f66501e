"""`shm` and `cuda_ipc`, for workers of one host: the sender maps the receiver's arena and copies blocks into it.

`shm` maps host memory, `cuda_ipc` the memory of a GPU, also of another one. If the receiver dies, a copy in flight
completes safely, because the mapping keeps the memory. If the sender dies, it may write until Linux has ended its
process, and the receiver learns of that end from a pidfd. A broken link is no proof that the sender stopped writing:
both processes may live.
"""

from collections.abc import Callable

from blockyard.services.kv_transfer.block_copier import BlockCopier, PeerBlocks
from blockyard.services.kv_transfer.connectors.interface import Landed, LandingFailed, LinkLost, WriteFailed, Written
from blockyard.services.kv_transfer.host_copies import Words
from blockyard.services.kv_transfer.protocol.incoming import Landing
from blockyard.services.kv_transfer.protocol.outgoing import BlockWrite

MAX_IN_FLIGHT = 2  # one copy runs, the next one is queued


class MappedWriter:
    """Copies blocks into the mapped arena of a receiver on this host."""

    maps_memory = True

    def __init__(self, own: BlockCopier, theirs: PeerBlocks) -> None:
        self.name, self.chunk_bytes = own.connector, own.chunk_bytes
        self._own = own
        self._theirs: PeerBlocks | None = theirs
        self._num_blocks = theirs[0].shape[1]
        self._in_flight = 0

    def open(self, opened: Callable[[], None], lost: LinkLost) -> None:
        opened()

    def try_start(self, write: BlockWrite, written: Written, failed: WriteFailed) -> bool:
        if self._in_flight >= MAX_IN_FLIGHT or self._theirs is None:
            return False
        if max(write.targets) >= self._num_blocks or max(write.sources) >= self._own.num_blocks:
            raise ValueError(f"blocks of transfer {write.number} are not in the pools")

        def done(sums: Words | None) -> None:
            self._in_flight -= 1
            written(write, sums, None)

        def broke(error: Exception) -> None:
            self._in_flight -= 1
            failed(write, str(error))

        self._in_flight += 1
        self._own.write(write.sources, self._theirs, write.targets, write.layers, done, broke)
        return True

    def free(self, place: bytes) -> None:
        """Does nothing: payloads name no memory."""

    def close(self) -> None:
        self._theirs = None  # a copy in flight keeps the mapping until it is complete

    def join(self) -> None:
        """Does nothing: `BlockCopier.drain` waits for the copies."""


class MappedReader:
    """Computes checksums of blocks that the sender has already written into this worker's arena."""

    has_payloads = False

    def __init__(self, own: BlockCopier) -> None:
        self._own = own

    def start(self, landing: Landing, payload: memoryview | None, landed: Landed, failed: LandingFailed) -> None:
        self._own.sum(
            landing.targets,
            landing.layers,
            lambda sums: landed(landing, sums),
            lambda error: failed(landing, str(error)),
        )
