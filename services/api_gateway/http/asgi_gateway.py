"""The gateway as an ASGI application, for the ASGI middleware around it.

A handler of aiohttp writes to its request's `writer`, and `ResponseWriter` to its transport. Both are replaced here:
what is written to them goes to `send`, in order, from one task. While `send` waits, the bytes stay in the transport's
buffer, whose size pauses the writer of a stream as that of a socket does.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote, unquote

from aiohttp import HttpVersion10, StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from blockyard.services.api_gateway.http.asgi_answer import EXCHANGE, HOP_BY_HOP, Message, Receive, Send

READ_AHEAD = 64 * 1024  # bytes of a body that wait for the handler
RESUME_BELOW = 64 * 1024  # bytes in the transport's buffer below which a handler goes on


class SendTransport(asyncio.Transport):
    """A transport that gives its bytes to `send` as the messages of one answer."""

    def __init__(self, outer: asyncio.Transport) -> None:
        super().__init__()
        self._outer = outer  # the client's connection
        self._start: Message | None = None
        self._queue: list[bytes] = []
        self._size = self._sending = 0  # bytes in the queue, and in a `send` that has not returned
        self._ended = self._closed = False
        self._wake, self._sent = asyncio.Event(), asyncio.Event()

    def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Status and headers of the answer, before its bytes."""
        raw = [(name.lower().encode("latin-1"), value.encode("utf-8")) for name, value in headers.items()]
        kept = [pair for pair in raw if pair[0] not in HOP_BY_HOP]
        self._start = {"type": "http.response.start", "status": status, "headers": kept}
        self._wake.set()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._queue.append(bytes(data))
        self._size += len(data)
        self._wake.set()

    def write_eof(self) -> None:
        """The answer is complete."""
        self._ended = True
        self._wake.set()

    async def run(self, send: Send) -> None:
        """Sends the answer to its end. Raises what `send` raises."""
        try:
            while self._start is None:
                await self._wake.wait()
                self._wake.clear()
            await send(self._start)
            while True:
                while not self._queue and not self._ended:
                    await self._wake.wait()
                    self._wake.clear()
                data, self._queue, ended = b"".join(self._queue), [], self._ended
                self._sending, self._size = len(data), 0
                await send({"type": "http.response.body", "body": data, "more_body": not ended})
                self._sending = 0
                self._sent.set()
                if ended:
                    return
        finally:
            self._closed = True
            self._sent.set()

    async def drained(self) -> None:
        """Waits until the buffer is below the limit."""
        while self._size + self._sending > RESUME_BELOW and not self._closed:
            self._sent.clear()
            await self._sent.wait()

    def get_write_buffer_size(self) -> int:
        """Bytes that `send` has not taken, and bytes that the client has not read."""
        waiting = self._size + self._sending
        return waiting if self._outer.is_closing() else waiting + self._outer.get_write_buffer_size()

    def is_closing(self) -> bool:
        return self._closed or self._outer.is_closing()

    def abort(self) -> None:
        self._outer.abort()

    def close(self) -> None:
        self._outer.close()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._outer.get_extra_info(name, default)


class SendWriter(AbstractStreamWriter):
    """What aiohttp's responses write to."""

    def __init__(self, transport: SendTransport) -> None:
        self._to = transport
        self.length = None

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        self._to.begin(int(status_line.split(" ", 2)[1]), headers)

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        self.output_size += len(chunk)
        self._to.write(chunk)
        await self._to.drained()

    async def write_eof(self, chunk: bytes = b"") -> None:
        if chunk:
            self._to.write(chunk)
        self._to.write_eof()

    async def drain(self) -> None:
        await self._to.drained()

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        raise NotImplementedError("no answer of the gateway is compressed")

    def enable_chunking(self) -> None:
        raise NotImplementedError("a request of HTTP/1.0 has no chunked answer")


class InnerConnection(BaseProtocol):
    """What a request knows of its connection. Bounds how far a body is read ahead of its handler."""

    def __init__(self, outer: web.BaseRequest, transport: SendTransport) -> None:
        super().__init__(asyncio.get_running_loop())
        self._outer = outer.protocol
        self.transport = transport
        self.peername, self.sockname = (transport.get_extra_info(name) for name in ("peername", "sockname"))
        self.ssl_context = transport.get_extra_info("sslcontext")
        self.max_headers, self.max_field_size = self._outer.max_headers, self._outer.max_field_size  # of a form's parts
        self._readable = asyncio.Event()
        self._readable.set()

    def pause_reading(self) -> None:
        self._reading_paused = True
        self._readable.clear()

    def resume_reading(self, resume_parser: bool = True) -> None:
        self._reading_paused = False
        self._readable.set()

    def close(self) -> None:
        """The client's connection is closed after this answer."""
        self._outer.close()

    async def feed(self, body: StreamReader, receive: Receive) -> None:
        """Reads the body from `receive` to its end."""
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                body.set_exception(web.RequestPayloadError("the body ended too early"))
                return
            if data := message.get("body"):
                body.feed_data(data)
            more = bool(message.get("more_body"))
            await self._readable.wait()
        body.feed_eof()


class AsgiGateway:
    """Calls aiohttp's handler of all routes for each ASGI request."""

    def __init__(
        self, handle: Callable[[Any], Awaitable[web.StreamResponse]], make_request: Callable[..., web.BaseRequest]
    ) -> None:
        self._handle, self._make_request = handle, make_request

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Raises ValueError for another scope than that of an HTTP request, and what `send` raises."""
        outer = scope.get(EXCHANGE)
        if scope["type"] != "http" or not isinstance(outer, web.BaseRequest):
            raise ValueError("a middleware passed on another scope than that of its HTTP request")
        if outer.transport is None:
            raise ConnectionResetError("the client is gone")
        transport = SendTransport(outer.transport)
        connection = InnerConnection(outer, transport)
        message = _message(scope)
        body = EMPTY_PAYLOAD
        try:
            async with asyncio.TaskGroup() as tasks:
                sending = tasks.create_task(transport.run(send))
                feeding = None
                if _has_body(message.headers):
                    body = StreamReader(connection, READ_AHEAD, loop=asyncio.get_running_loop())
                    feeding = tasks.create_task(connection.feed(body, receive))
                task = asyncio.current_task()
                request = self._make_request(message, body, connection, SendWriter(transport), task)
                response = await self._answer(request)
                await response.prepare(request)
                if isinstance(response, web.Response) and not response.keep_alive:
                    connection.close()
                await response.write_eof()
                await sending
                if feeding is not None:
                    feeding.cancel()
        except BaseExceptionGroup as e:
            raise _first(e) from e

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._handle(request)
        except web.HTTPException as e:  # below 400, as a redirect: the others are error bodies
            return web.Response(status=e.status, reason=e.reason, text=e.text, headers=e.headers)


def _message(scope: Message) -> RawRequestMessage:
    """The request line and headers of a scope. Its path counts where a middleware has changed it alone."""
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in scope["headers"]:
        headers.add(bytes(name).decode("latin-1"), bytes(value).decode("utf-8", "surrogateescape"))
    raw = bytes(scope.get("raw_path") or b"").decode("ascii", "surrogateescape")
    path = raw if unquote(raw) == scope["path"] else quote(scope["path"], safe="/:@!$&'()*+,;=~")
    query = bytes(scope.get("query_string") or b"").decode("ascii", "surrogateescape")
    target = f"{path}?{query}" if query else path
    url = URL.build(path=path, query_string=query, encoded=True)
    pairs = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
    return RawRequestMessage(
        scope["method"], target, HttpVersion10, CIMultiDictProxy(headers), pairs, False, None, False, False, url
    )


def _has_body(headers: CIMultiDictProxy[str]) -> bool:
    return "Transfer-Encoding" in headers or headers.get("Content-Length", "0") != "0"


def _first(group: BaseExceptionGroup) -> BaseException:
    """The first error of the tasks of a request."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
