"""Spreads the handling of requests over iterations of the event loop, so that open streams are written in between."""

import asyncio
from collections import deque

TURNS = 2  # requests that begin in one iteration: about 1 ms of handling, with bodies of 64 KiB up to 20 ms


class Turns:
    """A queue in order of arrival."""

    def __init__(self, per_iteration: int = TURNS) -> None:
        self._per_iteration = per_iteration
        self._taken = 0  # in this iteration
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()

    async def take(self) -> None:
        if not self._taken:
            self._loop.call_soon(self._next)
        if self._taken < self._per_iteration and not self._waiting:
            self._taken += 1
            return
        turn = self._loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        """Runs once in each iteration while requests wait."""
        self._taken = 0
        while self._waiting and self._taken < self._per_iteration:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have disconnected
                turn.set_result(None)
                self._taken += 1
        if self._taken:
            self._loop.call_soon(self._next)
