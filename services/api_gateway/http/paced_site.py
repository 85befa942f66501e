"""Listening sockets that accept a few connections in each iteration of the event loop.

The servers of asyncio and uvloop accept all waiting connections at once: 2,000 of them hold the loop for 0.2 s, and
with it the tokens of every open stream. Here the others wait in the kernel's queue.
"""

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

log = logging.getLogger(__name__)

ACCEPTS = 4  # connections a socket accepts in one iteration
BACKLOG = 2048
PAUSE_S = 0.1  # without accepting, when the process or the host has no file descriptor left
NO_RESOURCES = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class PacedSite(web.BaseSite):
    """A site of aiohttp. `bind` makes a server with `start_serving=False`, of which only the bound sockets are used."""

    def __init__(
        self,
        runner: web.BaseRunner,
        name: str,
        bind: Callable[[], Awaitable[asyncio.Server]],
        context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, ssl_context=context)
        self._name, self._bind = name, bind
        self._sockets: list[socket.socket] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    @classmethod
    def at_port(
        cls,
        runner: web.BaseRunner,
        host: str,
        port: int,
        context: ssl.SSLContext | None = None,
        reuse_port: bool | None = None,
    ) -> "PacedSite":
        """An empty host: all interfaces."""

        async def bind() -> asyncio.Server:
            loop, server = asyncio.get_running_loop(), runner.server
            assert server is not None
            return await loop.create_server(server, host or None, port, reuse_port=reuse_port, start_serving=False)

        return cls(runner, f"port {port}", bind, context)

    @classmethod
    def at_path(cls, runner: web.BaseRunner, path: str, context: ssl.SSLContext | None = None) -> "PacedSite":
        """A Unix socket. Replaces the socket file of an earlier process."""

        async def bind() -> asyncio.Server:
            loop, server = asyncio.get_running_loop(), runner.server
            assert server is not None
            return await loop.create_unix_server(server, path, start_serving=False)

        return cls(runner, f"socket {path}", bind, context)

    @property
    def name(self) -> str:
        return self._name

    def replace_context(self, context: ssl.SSLContext) -> None:
        """Later connections have this TLS context."""
        self._ssl_context = context

    async def start(self) -> None:
        """Raises OSError if the address cannot be bound."""
        await super().start()
        self._server = server = await self._bind()
        for bound in server.sockets:
            # a copy of the descriptor, because the loop refuses readers of descriptors that its own objects have
            listener = socket.socket(fileno=os.dup(bound.fileno()))
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._sockets.append(listener)
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    async def stop(self) -> None:
        for task in self._connecting:
            task.cancel()
        sockets, self._sockets = self._sockets, []
        for listener in sockets:
            self._loop.remove_reader(listener.fileno())
            listener.close()
        await super().stop()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                if e.errno not in NO_RESOURCES:
                    raise
                log.error("no connection is accepted for %g s: %s", PAUSE_S, e.strerror)
                self._loop.remove_reader(listener.fileno())
                self._loop.call_later(PAUSE_S, self._resume, listener)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._sockets:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    async def _connect(self, connection: socket.socket) -> None:
        """Hands a connection to the runner's server, with TLS after the handshake."""
        server = self._runner.server
        assert server is not None
        try:
            await self._loop.connect_accepted_socket(server, connection, ssl=self._ssl_context)
        except OSError as e:  # also ssl.SSLError and TimeoutError; the transport has closed the connection
            log.debug("a connection ended before its first request: %s", e)
