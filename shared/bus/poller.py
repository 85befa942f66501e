"""Waits for messages on many ZeroMQ sockets at once, in a plain thread or in asyncio."""

import asyncio
import math
from typing import Any, TypeAlias

import zmq

from blockyard.shared.bus.sockets import descriptor

Readable: TypeAlias = "zmq.Socket[Any] | int"  # an int is a file descriptor


class Poller:
    """The sockets and file descriptors of one process.

    After each wait the owner drains all: a wake-up does not say which has a message.
    """

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._sources: list[Readable] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._awake = asyncio.Event()

    def add(self, *sources: Readable) -> None:
        for source in sources:
            self._sources.append(source)
            self._poller.register(source, zmq.POLLIN)
            if self._loop is not None:
                self._loop.add_reader(_descriptor(source), self._awake.set)

    def remove(self, *sources: Readable) -> None:
        """To be called before a socket is closed, or in a plain thread before the next `wait`."""
        for source in sources:
            self._sources.remove(source)
            self._poller.unregister(source)
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(_descriptor(source))

    def wait(self, timeout_s: float) -> None:
        """For plain threads: returns when a message waits or the time is over."""
        self._poller.poll(math.ceil(1000 * timeout_s))

    def enter_loop(self) -> None:
        """From now on all sockets wake the running asyncio loop, including sockets added later."""
        self._loop = asyncio.get_running_loop()
        for source in self._sources:
            self._loop.add_reader(_descriptor(source), self._awake.set)

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


def _descriptor(source: Readable) -> int:
    return source if isinstance(source, int) else descriptor(source)
