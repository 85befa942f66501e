"""The interface of a connector: a writer on the sender's side, a reader on the receiver's."""

from collections.abc import Callable
from typing import Protocol

import zmq

from blockyard.services.kv_transfer.host_copies import Words
from blockyard.services.kv_transfer.protocol.incoming import Landing
from blockyard.services.kv_transfer.protocol.outgoing import BlockWrite

Written = Callable[[BlockWrite, Words | None, "Payload | None"], None]  # checksums [n] over the copied layers
Landed = Callable[[Landing, Words | None], None]
WriteFailed = Callable[[BlockWrite, str], None]  # with the reason
LandingFailed = Callable[[Landing, str], None]
LinkLost = Callable[[str], None]  # with the reason


class Payload(Protocol):
    """Bytes of a copy, or where they are: second part of a `BlocksWritten` message. Call `sent` or `discard`, once."""

    @property
    def view(self) -> memoryview:
        """The bytes to send."""

    def sent(self, tracker: zmq.MessageTracker) -> None:
        """libzmq reads the bytes in place until `tracker` is done. The buffer is reused after that."""

    def discard(self) -> None:
        """The bytes are not sent. The buffer is reused at once."""


class BlockWriter(Protocol):
    """Copies this worker's blocks to one receiver. No call waits."""

    name: str
    chunk_bytes: int  # upper bound of one copy
    maps_memory: bool  # this process writes to the receiver's memory itself, and may go on when the link breaks

    def open(self, opened: Callable[[], None], lost: LinkLost) -> None:
        """Call it first. Calls `opened`, at once or in a later `BlockCopier.poll`; no copy may start before that.

        Calls `lost`, once at most, if the connector fails: the link must close, without a frame about copies that fail
        after that. Their bytes may still arrive.
        """

    def try_start(self, write: BlockWrite, written: Written, failed: WriteFailed) -> bool:
        """Starts a copy. Returns False if too many are in flight: try again after one is complete.

        A later `BlockCopier.poll` calls `written` or `failed`. The copy reads the source blocks and writes to the
        receiver's memory only between `try_start` and that call. Raises ValueError for blocks outside of the pools.
        """

    def free(self, place: bytes) -> None:
        """The receiver has emptied the memory that a `Payload` of these bytes named. Other payloads are the blocks."""

    def close(self) -> None:
        """Unmaps the receiver's memory once no copy is in flight, or ends the copies. They are reported in any case."""

    def join(self) -> None:
        """Waits until `close` is complete."""


class BlockReader(Protocol):
    """Stores the blocks that one sender has sent. No call waits."""

    has_payloads: bool  # a `Payload` comes with `BlocksWritten`

    def start(self, landing: Landing, payload: memoryview | None, landed: Landed, failed: LandingFailed) -> None:
        """Copies `payload`, or what it names, into the arena, if there is one, and computes the checksums of the blocks
        in the arena.

        payload: None if the sender has written to the arena itself. Calls `landed` or `failed`, at once or in a later
        `BlockCopier.poll`.
        """
