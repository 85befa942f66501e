"""TCP, between any two workers: the sender packs blocks into messages, and the receiver unpacks them into its arena.

Only the receiver writes to its arena, so a sender that died cannot damage it. The packed bytes are a copy: after an
abort the source blocks are free at once, though their bytes may still be on the way. The receiver drops these.
"""

import numpy as np
import zmq

from blockyard.services.kv_transfer.connectors.interface import Landed, LandingFailed, WriteFailed, Written
from blockyard.services.kv_transfer.copy_thread import CopyThread
from blockyard.services.kv_transfer.host_blocks import Checksums, Words, pack_blocks, unpack_blocks
from blockyard.services.kv_transfer.protocol.incoming import Landing
from blockyard.services.kv_transfer.protocol.outgoing import BlockWrite

CHUNK_BYTES = 2 << 20
NUM_BUFFERS = 8  # bounds the packed bytes of a link that its socket has not sent yet


class PackedBlocks:
    """A `Payload` in one of the buffers of a `TcpWriter`."""

    def __init__(self, writer: "TcpWriter", buffer: Words, num_words: int) -> None:
        self._writer, self._buffer, self._num_words = writer, buffer, num_words

    @property
    def view(self) -> memoryview:
        return self._buffer[: self._num_words].data.cast("B")

    def sent(self, tracker: zmq.MessageTracker) -> None:
        self._writer.return_buffer(self._buffer, tracker)

    def discard(self) -> None:
        self._writer.return_buffer(self._buffer, None)


class TcpWriter:
    """Packs blocks into buffers, whose bytes the link sends."""

    name = "tcp"
    maps_memory = False

    def __init__(self, own: Words, copies: CopyThread, checksums: Checksums | None) -> None:
        """own [layers, num_blocks, words]."""
        self.chunk_bytes = max(CHUNK_BYTES, 8 * own.shape[2])
        self._own, self._copies, self._checksums = own, copies, checksums
        self._free: list[Words] = []
        self._sending: list[tuple[Words, zmq.MessageTracker]] = []
        self._num_buffers = 0

    def try_start(self, write: BlockWrite, written: Written, failed: WriteFailed) -> bool:
        buffer = self._buffer()
        if buffer is None:
            return False
        own, checksums, words = self._own, self._checksums, self._own.shape[2]
        sources = np.array(write.sources)
        if (sources >= own.shape[1]).any():
            raise ValueError(f"blocks of transfer {write.number} are not in the pool")
        num_words = len(write.layers) * len(sources) * words

        def job() -> Words | None:
            packed = buffer[:num_words].reshape(len(write.layers), len(sources), words)
            pack_blocks(own, sources, write.layers, packed)
            return None if checksums is None else checksums.of_packed(packed, write.layers)

        def broke(error: Exception) -> None:
            self.return_buffer(buffer, None)
            failed(write, str(error))

        self._copies.submit(job, lambda sums: written(write, sums, PackedBlocks(self, buffer, num_words)), broke)
        return True

    def return_buffer(self, buffer: Words, tracker: zmq.MessageTracker | None) -> None:
        """tracker: of the message that libzmq sends from the buffer; None if there is none."""
        if tracker is None:
            self._free.append(buffer)
        else:
            self._sending.append((buffer, tracker))

    def close(self) -> None:
        """Does nothing: a buffer is freed when libzmq has sent its last message."""

    def _buffer(self) -> Words | None:
        if not self._free:
            sending, self._sending = self._sending, []
            for buffer, tracker in sending:
                self.return_buffer(buffer, None if tracker.done else tracker)
        if not self._free and self._num_buffers < NUM_BUFFERS:
            self._num_buffers += 1
            self._free.append(np.empty(self.chunk_bytes // 8, np.uint64))
        return self._free.pop() if self._free else None


class TcpReader:
    """Copies received bytes into this worker's arena."""

    def __init__(self, own: Words, copies: CopyThread, checksums: Checksums | None) -> None:
        self._own, self._copies, self._checksums = own, copies, checksums

    def start(self, landing: Landing, payload: memoryview | None, landed: Landed, failed: LandingFailed) -> None:
        assert payload is not None, "the bytes come with the frame"
        own, checksums = self._own, self._checksums
        targets, layers = np.array(landing.targets), landing.layers
        packed = np.frombuffer(payload, np.uint64).reshape(len(layers), len(targets), own.shape[2])

        def job() -> Words | None:
            unpack_blocks(packed, own, targets, layers)
            return None if checksums is None else checksums.of_blocks(own, targets, layers)

        self._copies.submit(job, lambda sums: landed(landing, sums), lambda error: failed(landing, str(error)))
