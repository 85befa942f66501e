"""Waits for messages on many ZeroMQ sockets at once, in a plain thread or in asyncio."""

import asyncio
import math
from typing import Any

import zmq

from blockyard.shared.bus.sockets import descriptor


class Poller:
    """The sockets of one process. After each wait the owner drains all: a wake-up does not say which has a message."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._sockets: list[zmq.Socket[Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awake = asyncio.Event()

    def add(self, *sockets: "zmq.Socket[Any]") -> None:
        for sock in sockets:
            self._sockets.append(sock)
            self._poller.register(sock, zmq.POLLIN)
            if self._loop is not None:
                self._loop.add_reader(descriptor(sock), self._awake.set)

    def remove(self, *sockets: "zmq.Socket[Any]") -> None:
        """To be called before a socket is closed."""
        for sock in sockets:
            self._sockets.remove(sock)
            self._poller.unregister(sock)
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(descriptor(sock))

    def wait(self, timeout_s: float) -> None:
        """For plain threads: returns when a message waits or the time is over."""
        self._poller.poll(math.ceil(1000 * timeout_s))

    def enter_loop(self) -> None:
        """From now on all sockets wake the running asyncio loop, including sockets added later."""
        self._loop = asyncio.get_running_loop()
        for sock in self._sockets:
            self._loop.add_reader(descriptor(sock), self._awake.set)

    def clear(self) -> None:
        """To be called before draining: any later arrival ends the next `wait_in_loop`."""
        self._awake.clear()

    async def wait_in_loop(self, timeout_s: float) -> None:
        assert self._loop is not None
        timer = self._loop.call_later(timeout_s, self._awake.set)
        await self._awake.wait()
        timer.cancel()

    def wake(self) -> None:
        """To be called after a send: descriptors are edge-triggered, and a send may consume the edge of an arrival."""
        if self._loop is not None:
            self._awake.set()
