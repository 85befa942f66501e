"""TCP, between any two workers: the sender packs blocks into messages, and the receiver unpacks them into its arena.

Only the receiver writes to its arena, so a sender that died cannot damage it. The packed bytes are a copy: after an
abort the source blocks are free at once, though their bytes may still be on the way. The receiver drops these.
"""

import math
from collections.abc import Callable

import zmq

from blockyard.services.kv_transfer.block_copier import BlockCopier
from blockyard.services.kv_transfer.connectors.interface import Landed, LandingFailed, LinkLost, WriteFailed, Written
from blockyard.services.kv_transfer.host_copies import Words
from blockyard.services.kv_transfer.layout import BlockLayout
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

    def __init__(self, own: BlockCopier, layout: BlockLayout) -> None:
        self.chunk_bytes = max(CHUNK_BYTES, layout.largest_piece_bytes)
        self._own, self._layout = own, layout
        self._free: list[Words] = []
        self._sending: list[tuple[Words, zmq.MessageTracker]] = []
        self._num_buffers = 0

    def open(self, opened: Callable[[], None], lost: LinkLost) -> None:
        opened()

    def try_start(self, write: BlockWrite, written: Written, failed: WriteFailed) -> bool:
        buffer = self._buffer()
        if buffer is None:
            return False
        if max(write.sources) >= self._own.num_blocks:
            raise ValueError(f"blocks of transfer {write.number} are not in the pool")
        shape = (len(write.layers), len(write.sources), self._layout.section_of(write.layers).piece_bytes // 8)
        packed = buffer[: math.prod(shape)].reshape(shape)

        def done(sums: Words | None) -> None:
            written(write, sums, PackedBlocks(self, buffer, packed.size))

        def broke(error: Exception) -> None:
            self.return_buffer(buffer, None)
            failed(write, str(error))

        self._own.pack(write.sources, write.layers, packed, done, broke)
        return True

    def return_buffer(self, buffer: Words, tracker: zmq.MessageTracker | None) -> None:
        """tracker: of the message that libzmq sends from the buffer; None if there is none."""
        if tracker is None:
            self._free.append(buffer)
        else:
            self._sending.append((buffer, tracker))

    def free(self, place: bytes) -> None:
        """Does nothing: payloads name no memory."""

    def close(self) -> None:
        """Does nothing: a buffer is freed when libzmq has sent its last message."""

    def join(self) -> None:
        """Does nothing: `BlockCopier.drain` waits for the copies."""

    def _buffer(self) -> Words | None:
        if not self._free:
            sending, self._sending = self._sending, []
            for buffer, tracker in sending:
                self.return_buffer(buffer, None if tracker.done else tracker)
        if not self._free and self._num_buffers < NUM_BUFFERS:
            self._num_buffers += 1
            self._free.append(self._own.make_buffer(self.chunk_bytes))
        return self._free.pop() if self._free else None


class TcpReader:
    """Copies received bytes into this worker's arena."""

    has_payloads = True

    def __init__(self, own: BlockCopier) -> None:
        self._own = own

    def start(self, landing: Landing, payload: memoryview | None, landed: Landed, failed: LandingFailed) -> None:
        assert payload is not None, "the bytes come with the frame"
        self._own.unpack(
            payload,
            landing.targets,
            landing.layers,
            lambda sums: landed(landing, sums),
            lambda error: failed(landing, str(error)),
        )
