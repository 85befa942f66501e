"""One HTTP answer's way to its client: raw writes to the transport, never awaited.

What the transport will not take at once stays with the streams and follows as one larger event.
"""

import asyncio
from collections.abc import Callable

from blockyard.services.api_gateway.responses.unread import Unread

BUFFER_LIMIT = 64 * 1024  # bytes the transport may hold before a stream's text waits here
RESUME_BELOW = 16 * 1024

SIZES = tuple(b"%x\r\n" % n for n in range(2048))  # chunk headers; events are rarely longer


def framed(data: bytes) -> bytes:
    """`data` as one chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Outlet:
    """The transport of one streamed answer, shared by its choices.

    Until `start` and while `behind`, choices keep their text; they register what will bring it later.
    """

    __slots__ = (
        "_catch_up",
        "_left",
        "_ready",
        "_resume_below",
        "behind",
        "chunked",
        "moved_s",
        "transport",
        "unread",
        "wrote_s",
    )

    def __init__(self, unread: Unread) -> None:
        self.unread = unread  # what all answers of the gateway keep
        self.transport: asyncio.WriteTransport | None = None
        self.chunked = True
        self.behind = True
        self.wrote_s = 0.0  # loop time of the last write
        self.moved_s = 0.0  # loop time when the client last took something
        self._left = 0  # bytes it had not taken then
        self._catch_up: list[Callable[[float], None]] = []
        self._resume_below = RESUME_BELOW
        self._ready: asyncio.Future[None] | None = None

    def start(self, transport: asyncio.WriteTransport, chunked: bool, now: float) -> None:
        """The headers are out: what was kept follows."""
        self.transport, self.chunked = transport, chunked
        self.wrote_s = self.moved_s = now
        self.catch_up(now)

    def on_catch_up(self, bring: Callable[[float], None]) -> None:
        self._catch_up.append(bring)

    def write(self, data: bytes, now: float) -> None:
        """Whatever the buffers hold: for what is small or last."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        transport.write(framed(data) if self.chunked else data)
        self.wrote_s = now

    def catch_up(self, now: float) -> None:
        """Called when the transport has drained: choices bring what they kept."""
        self.behind = False
        self.unread.drop(self)
        waiting, self._catch_up = self._catch_up, []
        for bring in waiting:
            bring(now)
        if self.transport is not None and self.transport.get_write_buffer_size() > BUFFER_LIMIT:
            self.fall_behind(now)
        elif self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def fall_behind(self, now: float) -> None:
        """The transport holds more than it should: from here on choices keep their text."""
        self.behind = True
        self.moved_s = now
        self._left = self.transport.get_write_buffer_size() if self.transport is not None else 0

    def sweep(self, now: float) -> None:
        """Every 50 ms while behind: resumes once the client has taken most of it, notes if it takes any."""
        if self.transport is None:
            return
        left = self.transport.get_write_buffer_size()
        if left < self._left:
            self.moved_s = now
        self._left = left
        if left < self._resume_below:
            self.catch_up(now)

    def is_gone(self) -> bool:
        return self.transport is not None and self.transport.is_closing()

    def abort(self) -> None:
        """The client takes too little: the connection is dropped, and with it the handler is cancelled."""
        if self.transport is not None:
            self.transport.abort()

    async def emptied(self) -> None:
        """Waits until the client's side of the connection has taken everything."""
        await asyncio.sleep(0)  # what was just written leaves at the end of the loop's round
        self._resume_below = 1
        if self.transport is not None and self.transport.get_write_buffer_size():
            self.fall_behind(asyncio.get_running_loop().time())
        await self.drained()

    async def drained(self) -> None:
        """Waits until nothing is kept back any more."""
        while self.behind:
            self._ready = asyncio.get_running_loop().create_future()
            await self._ready
