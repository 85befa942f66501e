"""Bounds the open HTTP connections of a gateway, so that idle ones cannot use up the file descriptors.

At the bound, a new connection replaces the connection that has been idle longest. If all are busy, the first request
of the new connection is answered with a 503. Bytes that are not valid HTTP are answered in JSON too.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from aiohttp import web

from blockyard.services.api_gateway.http.client_text import escaped
from blockyard.services.api_gateway.http.request_context import client_is_gone
from blockyard.services.api_gateway.responses.json_response import error_response
from blockyard.services.api_gateway.turns import Turns
from blockyard.shared.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

RESERVE = 256  # file descriptors for links, logs and files; a sixteenth of a large limit
SURPLUS = 32  # connections above the bound that get a 503; further ones are closed at once
MOST_BY_DEFAULT = 16_384  # an idle connection takes 6 kB
IDLE_S = 1.0  # a connection opened or used within this time is not replaced
MAX_PARSER_CHARS = 200  # of the HTTP parser's message, which repeats what the client sent
LOG_S = 60.0  # at most one log line in this time

Handle = Callable[[Any], Awaitable[web.StreamResponse]]
Around = Callable[[Handle, Callable[..., web.BaseRequest]], Handle]


def bound(asked: int | None, open_files: int) -> int:
    """The most connections of a gateway. Raises ConfigError if `asked` is above the limit on open files."""
    reserve = min(max(RESERVE, open_files // 16), open_files // 2)
    allowed = open_files - reserve - SURPLUS
    if asked is None:
        return max(1, min(allowed, MOST_BY_DEFAULT))
    if asked > allowed:
        raise ConfigError(
            f"--max-connections {asked}: the limit of {open_files} open files (ulimit -Hn) allows {max(1, allowed)}"
        )
    return asked


class JsonErrorHandler(web.RequestHandler):
    """aiohttp's handler of one connection. Bytes that are not valid HTTP get the error body of OpenAI's APIs.

    No route, and so no API, is known then. The connection closes after the answer.
    """

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Raises ConnectionError if an answer has begun or the client is gone: aiohttp then closes the connection."""
        if isinstance(exc, ConnectionError) and client_is_gone(request):
            log.debug("a client left before its answer was complete: %s", exc)
            raise exc
        super().handle_error(request, status, exc, message)  # writes the log
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            text = "The server failed at this request."
        else:
            text = f"the request is not valid HTTP: {escaped(' '.join((message or '').split())[:MAX_PARSER_CHARS])}"
        response = error_response(RequestError(text, status=status))
        response.force_close()
        return response


class BoundedServer(web.Server):
    """aiohttp's server with a bound on its connections."""

    def __init__(self, most: int, handler: Callable[[Any], Awaitable[web.StreamResponse]], **kwargs: Any) -> None:
        super().__init__(self._serve, **kwargs)
        self._most, self._inner = most, handler
        self._clock = asyncio.get_running_loop().time
        self._open: set[web.RequestHandler] = set()
        self._idle: dict[web.RequestHandler, float] = {}  # idle since; oldest first
        self._surplus: set[web.RequestHandler] = set()
        self._logged_s = -LOG_S
        self._turns = Turns()

    def __call__(self) -> web.RequestHandler:
        return JsonErrorHandler(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._open.add(handler)
        self._idle[handler] = self._clock()
        num = len(self._open)
        if num > self._most and not self._close_idle():
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
            error = RequestError("This server has no connection free.", status=503, retry_after_s=1.0)
            response = error_response(error)
            response.force_close()
            return response
        self._idle.pop(connection, None)
        try:
            await self._turns.take()
            return await self._inner(request)
        finally:
            if connection in self._open:
                self._idle[connection] = self._clock()

    def _close_idle(self) -> bool:
        """Closes the connection that has been idle longest. False if there is none."""
        now = self._clock()
        while self._idle:
            connection, since_s = next(iter(self._idle.items()))
            if now - since_s < IDLE_S:
                return False
            del self._idle[connection]
            transport = connection.transport
            if transport is not None and transport.get_write_buffer_size():
                self._idle[connection] = now  # its client is still reading the last answer
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
    """Runs an application with at most `most` connections, summed over its listening sockets."""

    def __init__(self, app: web.Application, most: int, around: Around | None = None, **kwargs: Any) -> None:
        """`around` puts more around the application: called with its handler and what makes its requests."""
        super().__init__(app, **kwargs)
        self._most, self._around = most, around

    async def _make_server(self) -> web.Server:
        plain = await super()._make_server()
        handler = plain.request_handler
        if self._around is not None:
            handler = self._around(handler, plain.request_factory)
        return BoundedServer(
            self._most,
            handler,
            request_factory=plain.request_factory,
            loop=asyncio.get_running_loop(),
            **self._kwargs,
        )
