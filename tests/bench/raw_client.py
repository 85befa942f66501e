"""A client that only notes what arrives when, and looks into it after the last stream has ended.

On two cores the client is part of what it measures; this one costs a few microseconds an event.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import uvloop
from rig import Chunk, decode_chunk


@dataclass
class RawLog:
    """One stream: pieces of the response as they were read."""

    started_s: float  # CLOCK_REALTIME, as are the other times
    pieces: list[tuple[float, bytes]] = field(default_factory=list)

    def events(self) -> list[tuple[float, Chunk]]:
        """When each event was whole, and the event."""
        status, _, _ = self.pieces[0][1].partition(b"\r\n") if self.pieces else (b"no answer", b"", b"")
        if b" 200 " not in status:
            raise RuntimeError(f"{status!r}: {b''.join(p for _, p in self.pieces)[-300:]!r}")
        found, body, in_head = [], b"", True
        for at, piece in self.pieces:
            body += piece
            if in_head:
                _, end, body = body.partition(b"\r\n\r\n")
                in_head = not end
            *whole, body = body.split(b"\n\n")
            for event in whole:
                _, data, text = event.partition(b"data: ")
                if data and text != b"[DONE]":
                    found.append((at, decode_chunk(text)))
        return found


class _Reader(asyncio.Protocol):
    def __init__(self, request: bytes, ended: "asyncio.Future[None]") -> None:
        self._request, self._ended = request, ended
        self.log = RawLog(time.time())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvloop's is none
        self._transport = transport
        self.log.started_s = time.time()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.log.pieces.append((time.time(), data))
        if data.endswith(b"0\r\n\r\n"):
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


async def _all(url: str, bodies: list[dict[str, object]]) -> list[RawLog]:
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    readers = []
    for body in bodies:
        text = json.dumps(body | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        request = head.encode() + b"Content-Length: %d\r\n\r\n" % len(text) + text
        ended = loop.create_future()
        _, reader = await loop.create_connection(lambda r=request, e=ended: _Reader(r, e), parts.hostname, parts.port)
        readers.append((reader, ended))
    await asyncio.gather(*(ended for _, ended in readers))
    return [reader.log for reader, _ in readers]


def raw_streams(url: str, bodies: list[dict[str, object]]) -> list[RawLog]:
    """All bodies at once, a connection each, to the end of the last."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_all(url, bodies))
