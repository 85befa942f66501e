"""Open streamed answers: starts and ends them, sends keep-alives, and sweeps answers with a slow client."""

import asyncio
import logging
import math

from aiohttp import web

from blockyard.services.api_gateway.responses.http_generation import HttpGeneration
from blockyard.services.api_gateway.responses.response_writer import ResponseWriter, UnreadText

log = logging.getLogger(__name__)

SWEEP_S = 0.05
BEGIN_S = 5.0  # the headers of an accepted request wait so long for its first output: until then it may fail
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class StreamedResponses:
    def __init__(self, keepalive_s: float, client_timeout_s: float, max_unread_bytes: int) -> None:
        """keepalive_s: 0: nothing keeps a silent stream alive."""
        self.unread_text = UnreadText(max_unread_bytes)
        self._keepalive_s, self._client_timeout_s = keepalive_s or math.inf, client_timeout_s
        self._open: dict[ResponseWriter, bytes] = {}  # with what keeps it alive
        self._opened = asyncio.Event()

    def writer(self) -> ResponseWriter:
        return ResponseWriter(self.unread_text)

    async def run(
        self, http_request: web.Request, generation: HttpGeneration, writer: ResponseWriter
    ) -> web.StreamResponse:
        """Writes the answer to its end. aiohttp cancels this when the client disconnects.

        Raises RequestError if the request fails before anything is written.
        """
        try:
            await generation.wait_begun(min(BEGIN_S, self._keepalive_s))
            return await self._write(http_request, generation, writer)
        finally:  # text may be kept for the writer before it starts
            self._open.pop(writer, None)
            self.unread_text.drop(writer)

    async def _write(
        self, http_request: web.Request, generation: HttpGeneration, writer: ResponseWriter
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers=HEADERS)
        chunked = http_request.version >= (1, 1)
        if chunked:
            response.enable_chunked_encoding()
        else:  # only the close ends a body without length, also if the client asks for keep-alive
            response.force_close()
        await response.prepare(http_request)
        transport = http_request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        loop = asyncio.get_running_loop()
        writer.start(transport, chunked, loop.time())
        self._open[writer] = generation.api.keep_alive
        self._opened.set()
        await generation.wait_finished()
        await writer.wait_resumed()
        writer.write_unpaused(generation.ending(), loop.time())
        await response.write_eof()
        await writer.flush()
        if generation.error is not None:
            http_request.protocol.close()  # takes effect when this handler has returned
        return response

    async def sweep(self) -> None:
        """Runs until cancelled. Never waits for a client."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._open:
                self._opened.clear()
                await self._opened.wait()
            now = loop.time()
            for writer, keep_alive in list(self._open.items()):
                self._sweep_one(writer, keep_alive, now)
            await asyncio.sleep(SWEEP_S)

    def _sweep_one(self, writer: ResponseWriter, keep_alive: bytes, now: float) -> None:
        if writer.paused:
            writer.sweep(now)
            if writer.paused and now - writer.last_read_s > self._client_timeout_s:
                log.warning("a client took nothing for %.0f s: its request is cancelled", self._client_timeout_s)
                writer.abort()
        elif writer.is_gone():
            writer.abort()
        elif now - writer.last_write_s >= self._keepalive_s:
            writer.write_unpaused(keep_alive, now)
