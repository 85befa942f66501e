"""Bounds the open HTTP connections of a gateway, so that idle ones never take the file descriptors of the rest.

Where the bound is reached, the connection that has been idle longest is closed for the new one. Only when all are busy
is the new one refused: its first request is a 503.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from blockyard.services.api_gateway.http.middleware import error_response
from blockyard.services.api_gateway.responses.error_body import ApiError
from blockyard.shared.errors import ConfigError

log = logging.getLogger(__name__)

RESERVE = 256  # descriptors kept back for links, logs and what is read; more of a large limit
SURPLUS = 32  # connections beyond the bound that are told so; still more are closed without an answer
MOST_BY_DEFAULT = 16_384  # an idle connection takes 6 kB
IDLE_S = 1.0  # a connection that was busy, or was opened, within it is not closed for another
LOG_S = 60.0  # at most one line about it in this time


def bound(asked: int | None, open_files: int) -> int:
    """Connections one gateway may have. Raises ConfigError if `asked` is more than the limit on open files allows."""
    reserve = min(max(RESERVE, open_files // 16), open_files // 2)
    allowed = open_files - reserve - SURPLUS
    if asked is None:
        return max(1, min(allowed, MOST_BY_DEFAULT))
    if asked > allowed:
        raise ConfigError(
            f"--max-connections {asked}: the limit of {open_files} open files (ulimit -Hn) allows {max(1, allowed)}"
        )
    return asked


class BoundedServer(web.Server):
    """aiohttp's server, which knows of each connection since when it is idle."""

    def __init__(self, most: int, handler: Callable[[Any], Awaitable[web.StreamResponse]], **kwargs: Any) -> None:
        super().__init__(self._serve, **kwargs)
        self._most, self._inner = most, handler
        self._clock = asyncio.get_running_loop().time
        self._open: set[web.RequestHandler] = set()
        self._idle: dict[web.RequestHandler, float] = {}  # since when; the longest first
        self._surplus: set[web.RequestHandler] = set()
        self._logged_s = -LOG_S

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._open.add(handler)
        self._idle[handler] = self._clock()
        num = len(self._open)
        if num > self._most and not self._close_one():
            self._log(f"{self._most} connections, none of them idle: new ones are refused (--max-connections)")
            self._surplus.add(handler)
            if num > self._most + SURPLUS:
                handler.force_close()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._open.discard(handler)
        self._idle.pop(handler, None)
        self._surplus.discard(handler)

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        if connection in self._surplus:
            error = ApiError("This server has no connection free.", status=503, retry_after_s=1.0)
            response = error_response(error)
            response.force_close()
            return response
        self._idle.pop(connection, None)
        try:
            return await self._inner(request)
        finally:
            if connection in self._open:
                self._idle[connection] = self._clock()

    def _close_one(self) -> bool:
        """Closes the connection that has been idle longest. False if there is none."""
        now = self._clock()
        while self._idle:
            connection, since_s = next(iter(self._idle.items()))
            if now - since_s < IDLE_S:
                return False
            del self._idle[connection]
            transport = connection.transport
            if transport is not None and transport.get_write_buffer_size():
                self._idle[connection] = now  # its client still reads the last answer
                continue
            self._log(f"{self._most} connections: the longest idle are closed for new ones (--max-connections)")
            connection.force_close()
            return True
        return False

    def _log(self, line: str) -> None:
        if self._clock() - self._logged_s >= LOG_S:
            self._logged_s = self._clock()
            log.warning("%s", line)


class BoundedRunner(web.AppRunner):
    """An application's runner with at most `most` connections, over all sockets it listens on."""

    def __init__(self, app: web.Application, most: int, **kwargs: Any) -> None:
        super().__init__(app, **kwargs)
        self._most = most

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        return BoundedServer(
            self._most,
            plain.request_handler,
            request_factory=plain.request_factory,
            loop=asyncio.get_running_loop(),
            **self._kwargs,
        )
