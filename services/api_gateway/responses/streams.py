"""Open streamed answers: begun, kept alive, swept while their client is slow, ended."""

import asyncio
import logging

from aiohttp import web

from blockyard.services.api_gateway.responses.chunks import usage_event
from blockyard.services.api_gateway.responses.error_body import body
from blockyard.services.api_gateway.responses.http_generation import Call
from blockyard.services.api_gateway.responses.response_writer import Outlet
from blockyard.services.api_gateway.responses.unread import Unread

log = logging.getLogger(__name__)

SWEEP_S = 0.05
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Streams:
    def __init__(self, keepalive_s: float, client_timeout_s: float, max_unread_bytes: int) -> None:
        self.unread = Unread(max_unread_bytes)
        self._keepalive_s, self._client_timeout_s = keepalive_s, client_timeout_s
        self._open: set[Outlet] = set()
        self._any = asyncio.Event()

    async def run(self, request: web.Request, call: Call, outlet: Outlet) -> web.StreamResponse:
        """Writes the answer to its end. Cancelled when the client is gone."""
        response = web.StreamResponse(headers=HEADERS)
        chunked = request.version >= (1, 1)
        if chunked:
            response.enable_chunked_encoding()
        await response.prepare(request)
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        loop = asyncio.get_running_loop()
        outlet.start(transport, chunked, loop.time())
        self._open.add(outlet)
        self._any.set()
        try:
            await call.finish()
            await outlet.drained()
            outlet.write(_ending(call), loop.time())
            await response.write_eof()
            await outlet.emptied()
            if call.error is not None:
                request.protocol.close()  # once this handler has returned
        finally:
            self._open.discard(outlet)
            self.unread.drop(outlet)
        return response

    async def sweep(self) -> None:
        """Runs for ever. Nothing here waits for a client."""
        loop = asyncio.get_running_loop()
        while True:
            if not self._open:
                self._any.clear()
                await self._any.wait()
            now = loop.time()
            for outlet in list(self._open):
                self._look_after(outlet, now)
            await asyncio.sleep(SWEEP_S)

    def _look_after(self, outlet: Outlet, now: float) -> None:
        if outlet.behind:
            outlet.sweep(now)
            if outlet.behind and now - outlet.moved_s > self._client_timeout_s:
                log.warning("a client took nothing for %.0f s: its request is cancelled", self._client_timeout_s)
                outlet.abort()
        elif outlet.is_gone():
            outlet.abort()
        elif now - outlet.wrote_s >= self._keepalive_s:
            outlet.write(KEEP_ALIVE, now)


def _ending(call: Call) -> bytes:
    if call.error is not None:
        return b"data: " + body(call.error) + b"\n\n"
    if call.job.shape.include_usage:
        return usage_event(call.job.shape, call.usage_json()) + DONE
    return DONE
