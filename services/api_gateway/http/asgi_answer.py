"""An aiohttp request as an ASGI exchange: its scope, `receive` and `send`, and what a wrong answer becomes.

no answer, an exception before the answer   a 500 in the form of the API, and a line in the log
an exception within the answer              the connection is aborted, so that no client takes the part for all
a second answer                             `send` raises in it; the client has the first
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from aiohttp import HttpVersion11, web
from multidict import CIMultiDict

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]  # of ASGI: its keys depend on "type"
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]

EXCHANGE = "blockyard.exchange"  # key of a scope: the aiohttp request
HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding"))  # aiohttp writes the connection's
BODILESS = frozenset((204, 304))
UNSENDABLE = frozenset(b"\0\r\n")  # bytes that no header has


class AnswerError(RuntimeError):
    """Raised in a middleware if its message does not fit its answer so far."""


def scope_of(request: web.BaseRequest) -> dict[str, Any]:
    """Returns the ASGI scope of a request."""
    transport = request.transport
    peer = None if transport is None else transport.get_extra_info("peername")
    own = None if transport is None else transport.get_extra_info("sockname")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": f"{request.version.major}.{request.version.minor}",
        "method": request.method,
        "scheme": request.scheme,
        "path": request.path,
        "raw_path": request.raw_path.partition("?")[0].encode("ascii", "surrogateescape"),
        "query_string": request.rel_url.raw_query_string.encode("ascii", "surrogateescape"),
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.raw_headers],
        "client": tuple(peer[:2]) if isinstance(peer, tuple) else None,
        "server": tuple(own[:2]) if isinstance(own, tuple) else None,
        "state": {},
        EXCHANGE: request,
    }


class AsgiAnswer:
    """The answer to one request, from the messages that the outermost ASGI application sends."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._complete = asyncio.Event()
        self._body_is_read = not request.can_read_body
        self._has_received = False
        self._left: int | None = None  # bytes of an announced body that were not sent yet

    async def receive(self) -> Message:
        """The next part of the body; after it, the end of the exchange."""
        request = self._request
        if self._body_is_read:
            if not self._has_received:
                self._has_received = True
                return {"type": "http.request", "body": b"", "more_body": False}
            await self._complete.wait()
            return {"type": "http.disconnect"}
        if not self._has_received:
            self._has_received = True
            self._ask_for_body()
        try:
            data = await request.content.readany()
        except (ConnectionError, web.RequestPayloadError):
            return {"type": "http.disconnect"}
        self._body_is_read = request.content.at_eof()
        return {"type": "http.request", "body": data, "more_body": not self._body_is_read}

    async def send(self, message: Message) -> None:
        """Waits while the client reads slowly. Raises AnswerError for a message that does not fit the answer so far."""
        kind = message["type"]
        if kind == "http.response.start":
            if self._response is not None:
                raise AnswerError("an answer was already begun")
            await self._start(message)
        elif kind == "http.response.body":
            if self._response is None:
                raise AnswerError("a body before its http.response.start")
            if self._complete.is_set():
                raise AnswerError("the answer is already complete")
            await self._write(self._response, bytes(message.get("body", b"")), bool(message.get("more_body")))
        else:
            raise AnswerError(f"the message {str(kind)[:80]!r} is not known here")

    def end(self, failed: Callable[[], web.Response]) -> web.StreamResponse:
        """Returns the answer, or `failed()` where none was begun, once the application has returned or raised.

        Raises ConnectionResetError if the client left before a complete answer, or has only a part of one.
        """
        request, response = self._request, self._response
        if response is not None and self._complete.is_set():
            return response
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        log.error("a middleware ended %s an answer", "without" if response is None else "within")
        if response is None:
            made = failed()
            if not request.content.is_eof():
                made.force_close()
            return made
        transport.abort()
        raise ConnectionResetError("the answer ended too early")

    def _ask_for_body(self) -> None:
        request, transport = self._request, self._request.transport
        expects = request.version == HttpVersion11 and request.headers.get("Expect", "").lower() == "100-continue"
        if expects and self._response is None and transport is not None:
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    async def _start(self, message: Message) -> None:
        status, headers = int(message["status"]), CIMultiDict[str]()
        if not 200 <= status <= 999:
            raise AnswerError(f"an answer has no status {status}")
        for name, value in message.get("headers", ()):
            if not UNSENDABLE.isdisjoint(bytes(name) + bytes(value)):
                raise AnswerError(f"the header {bytes(name)[:80]!r} has an end of line or a NUL")
            if bytes(name).lower() not in HOP_BY_HOP:
                headers.add(bytes(name).decode("latin-1"), bytes(value).decode("latin-1"))
        request, response = self._request, web.StreamResponse(status=status, headers=headers)
        if response.status >= 400 and not request.content.is_eof():
            response.force_close()  # as in `middleware.errors`
        if not self._is_bodiless(response.status):
            self._left = response.content_length
            if self._left is None and request.version >= HttpVersion11:
                response.enable_chunked_encoding()
            elif self._left is None:  # only the close ends the body
                response.force_close()
        await response.prepare(request)
        self._response = response

    async def _write(self, response: web.StreamResponse, data: bytes, more: bool) -> None:
        if data and not self._is_bodiless(response.status):
            if self._left is not None:
                self._left -= len(data)
                if self._left < 0:
                    raise AnswerError(f"the body is longer than its Content-Length {response.content_length}")
            await response.write(data)
        if more:
            return
        if self._left:
            raise AnswerError(f"the body is {self._left} bytes shorter than its Content-Length")
        await response.write_eof()
        self._complete.set()

    def _is_bodiless(self, status: int) -> bool:
        return self._request.method == "HEAD" or status in BODILESS
