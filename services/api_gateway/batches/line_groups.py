"""Lets lines into the ring in groups, because a step of few sequences costs its processes as much as one of many."""

import asyncio


class LineGroups:
    """Lines whose prompts are token ids wait here until there are `size` of them, or no line is in the ring.

    So the ring is never empty while a line waits, and a ring that is busy with more lines than one group (which has a
    queue of them) does not notice.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting: list[asyncio.Future[None]] = []
        self._num_inside = 0

    def turn(self) -> "LineTurn":
        return LineTurn(self)

    async def enter(self) -> None:
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(entered)
        if not self._num_inside or len(self._waiting) >= self._size:
            self._let_in()
        try:
            await entered
        except asyncio.CancelledError:
            if not entered.cancelled():  # it was let in
                self.leave()
            raise

    def leave(self) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self._let_in()

    def _let_in(self) -> None:
        waiting, self._waiting = self._waiting, []
        for entered in waiting:
            if not entered.done():  # not cancelled
                entered.set_result(None)
                self._num_inside += 1


class LineTurn:
    """The turn of one line: its `enter` is awaited before it is sent into the ring, `leave` is called in any case."""

    def __init__(self, groups: LineGroups) -> None:
        self._groups = groups
        self._entered = False

    async def enter(self) -> None:
        await self._groups.enter()
        self._entered = True

    def leave(self) -> None:
        if self._entered:
            self._entered = False
            self._groups.leave()
