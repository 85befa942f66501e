"""The numbered events of one background response. Events of text are alike, so most are kept compressed."""

import asyncio
import zlib

import msgspec

PIECE_BYTES = 64 * 1024  # of events that are compressed together
LEVEL = 1
END = b"\n\n"  # of an event


class Piece(msgspec.Struct, frozen=True, array_like=True):
    first: int  # number of its first event
    data: bytes  # compressed


class EventLog:
    """Events are numbered from 0, as their `sequence_number` is. They are appended whole."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._tail: list[bytes] = []  # events that are not compressed yet, with their ends
        self._tail_first = self._tail_bytes = 0
        self.ended = False
        self._changed = asyncio.Event()

    @classmethod
    def unpacked(cls, packed: bytes) -> "EventLog":
        """The log of a response that has ended."""
        log = cls()
        log.ended = True
        pieces, log._tail_first = msgspec.msgpack.decode(packed, type=tuple[list[Piece], int])
        log._pieces = pieces
        return log

    @property
    def last(self) -> int:
        """The number of the last event; -1 before the first."""
        return self._tail_first + len(self._tail) - 1

    def append(self, data: bytes) -> None:
        """One event or several."""
        self._tail += [event + END for event in data.split(END)[:-1]]
        self._tail_bytes += len(data)
        if self._tail_bytes >= PIECE_BYTES:
            self._compress()
        self._notify()

    def end(self) -> None:
        """No event follows."""
        self._compress()
        self.ended = True
        self._notify()

    def packed(self) -> bytes:
        """The events of an ended log, for a store."""
        return msgspec.msgpack.encode((self._pieces, self._tail_first))

    def read(self, after: int) -> tuple[bytes, int]:
        """Some of the events behind number `after`, and the number of the last of them. Empty: there are none yet."""
        first = after + 1
        if first >= self._tail_first:
            events = self._tail[first - self._tail_first :]
            return b"".join(events), after + len(events)
        piece = next(one for one in reversed(self._pieces) if one.first <= first)
        found = zlib.decompress(piece.data).split(END)[first - piece.first : -1]
        return b"".join([event + END for event in found]), after + len(found)

    async def wait(self, after: int, patience_s: float) -> None:
        """Waits until there are events behind number `after`, or the end, but no longer than `patience_s`."""
        try:
            async with asyncio.timeout(patience_s):
                while self.last <= after and not self.ended:
                    await self._changed.wait()
        except TimeoutError:
            return

    def _compress(self) -> None:
        if self._tail:
            self._pieces.append(Piece(self._tail_first, zlib.compress(b"".join(self._tail), LEVEL)))
            self._tail_first += len(self._tail)
            self._tail, self._tail_bytes = [], 0

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
