"""Writes of one streamed answer to its client: straight to the transport, never awaited.

A choice is generated to its end whether its client reads or not, and no other service keeps delivered text. Text that
a slow client has not read therefore stays in the gateway: first in the transport's buffer, then, while the writer is
paused, with the choices' streams, which send it later as one larger event. `UnreadText` bounds that memory.
"""

import asyncio
import logging
from collections.abc import Callable

from blockyard.shared.messages import TextDelta

log = logging.getLogger(__name__)

BUFFER_LIMIT = 64 * 1024  # bytes in the transport's buffer above which the writer pauses
RESUME_BELOW = 16 * 1024
TOKEN_BYTES = 64  # memory of a token with its text, once several are merged into one delta
LOGPROB_BYTES, TOP_BYTES = 350, 120  # memory of a token's log-probability, and of each of its top candidates


def http_chunk(data: bytes) -> bytes:
    """`data` as one chunk of HTTP's chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def size_of(delta: TextDelta) -> int:
    """Approximate memory of a delta in bytes."""
    logprobs = delta.logprobs
    num_top = len(logprobs[0].top_ids) if logprobs else 0
    return len(delta.text) + TOKEN_BYTES * len(delta.token_ids) + len(logprobs) * (LOGPROB_BYTES + TOP_BYTES * num_top)


class ResponseWriter:
    """The transport of one streamed answer, shared by its choices.

    It is paused until `start`, and whenever the transport's buffer is above the limit. While it is paused the choices
    keep their text and register a callback that writes it on `resume`.
    """

    def __init__(self, unread_text: "UnreadText") -> None:
        self.chunked = True
        self.paused = True
        self.last_write_s = 0.0  # loop time of the last write
        self.last_read_s = 0.0  # loop time at which the client was last seen to read
        self._unread_text = unread_text
        self._transport: asyncio.WriteTransport | None = None
        self._unread = 0  # bytes in the transport's buffer at last_read_s
        self._on_resume: list[Callable[[float], None]] = []
        self._resume_below = RESUME_BELOW
        self._resumed: asyncio.Future[None] | None = None

    def start(self, transport: asyncio.WriteTransport, chunked: bool, now: float) -> None:
        """The headers were sent: writes the text that the choices kept until now."""
        self._transport, self.chunked = transport, chunked
        self.last_write_s = self.last_read_s = now
        self.resume(now)

    def on_resume(self, write_kept: Callable[[float], None]) -> None:
        self._on_resume.append(write_kept)

    def keep(self, num_bytes: int) -> None:
        """A choice keeps text of this size until the writer resumes."""
        self._unread_text.add(self, num_bytes)

    def frame(self, data: bytes) -> bytes:
        return http_chunk(data) if self.chunked else data

    def write(self, framed: bytes, now: float) -> None:
        """Pauses the writer if the transport's buffer is above the limit afterwards."""
        transport = self._transport
        if transport is None or transport.is_closing():  # a write would raise, or be logged as an error
            return
        transport.write(framed)
        self.last_write_s = now
        if transport.get_write_buffer_size() > BUFFER_LIMIT:
            self.pause(now)

    def write_unpaused(self, data: bytes, now: float) -> None:
        """Writes small or final events, whatever the buffer holds."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        transport.write(self.frame(data))
        self.last_write_s = now

    def resume(self, now: float) -> None:
        """The client has read most of the buffer: the choices write the text they kept."""
        self.paused = False
        self._unread_text.drop(self)
        callbacks, self._on_resume = self._on_resume, []
        for write_kept in callbacks:
            write_kept(now)
        if self._transport is not None and self._transport.get_write_buffer_size() > BUFFER_LIMIT:
            self.pause(now)
        elif self._resumed is not None and not self._resumed.done():
            self._resumed.set_result(None)

    def pause(self, now: float) -> None:
        self.paused = True
        self.last_read_s = now
        self._unread = self._transport.get_write_buffer_size() if self._transport is not None else 0

    def sweep(self, now: float) -> None:
        """Called every 50 ms while paused: notes whether the client reads, and resumes once most of it is read."""
        if self._transport is None:
            return
        unread = self._transport.get_write_buffer_size()
        if unread < self._unread:
            self.last_read_s = now
        self._unread = unread
        if unread < self._resume_below:
            self.resume(now)

    def is_gone(self) -> bool:
        return self._transport is not None and self._transport.is_closing()

    def abort(self) -> None:
        """The client reads too slowly: drops the connection, which cancels the request's handler."""
        if self._transport is not None:
            self._transport.abort()

    async def flush(self) -> None:
        """Waits until the transport's buffer is empty."""
        await asyncio.sleep(0)  # uvloop writes at the end of the loop's iteration
        self._resume_below = 1
        if self._transport is not None and self._transport.get_write_buffer_size():
            self.pause(asyncio.get_running_loop().time())
        await self.wait_resumed()

    async def wait_resumed(self) -> None:
        """Waits until no choice keeps text."""
        while self.paused:
            self._resumed = asyncio.get_running_loop().create_future()
            await self._resumed


class UnreadText:
    """Memory of all text that slow clients of this gateway have not read; above the bound, the largest is aborted."""

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._by_writer: dict[ResponseWriter, int] = {}

    def add(self, writer: ResponseWriter, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._by_writer[writer] = self._by_writer.get(writer, 0) + num_bytes
        if self.num_bytes > self._max_bytes:
            slowest = max(self._by_writer, key=self._by_writer.__getitem__)
            log.warning(
                "clients have not read %d MiB of their answers, --max-unread-mib: the one with %d MiB is cancelled",
                self.num_bytes >> 20,
                self._by_writer[slowest] >> 20,
            )
            self.drop(slowest)
            slowest.abort()

    def drop(self, writer: ResponseWriter) -> None:
        """The writer keeps nothing any more."""
        self.num_bytes -= self._by_writer.pop(writer, 0)
