"""Blocks that nobody holds, in the order in which they were left: the first is given up first.

A prompt's blocks are left, and taken from here again, thousands at a time. So the order is kept of leavings, not of
blocks: each block knows the leaving that it was part of last, and what an older leaving says of it counts no more.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

from blockyard.services.scheduler.kv_cache.id_pool import Horizon

SLACK = 16  # blocks that a leaving may list in vain, besides as many as are still its own


class Leaving:
    """Blocks that were left together. `listed` ends with the first to be given up, and may list some in vain."""

    __slots__ = ("is_idle", "listed", "num_blocks", "plan")

    def __init__(self, blocks: Sequence[int], plan: int) -> None:
        self.listed = [*reversed(blocks)]
        self.num_blocks = len(blocks)
        self.plan = plan  # the last one sent by then
        self.is_idle = False  # that plan's result is in


class Shelf:
    """Blocks cool until the result of the last plan sent when they were left is in, and are idle then."""

    def __init__(self, num_blocks: int, horizon: Horizon) -> None:
        self.num_idle = 0
        self.num_cooling = 0
        self._horizon = horizon
        self._left: list[Leaving | None] = [None] * num_blocks
        self._idle: OrderedDict[Leaving, None] = OrderedDict()
        self._cooling: OrderedDict[Leaving, None] = OrderedDict()

    def has(self, block: int) -> bool:
        return self._left[block] is not None

    def put(self, blocks: Sequence[int]) -> None:
        """Their last users have left them; in the order in which they are to be given up."""
        if not blocks:
            return
        horizon, left = self._horizon, self._left
        leaving = Leaving(blocks, horizon.sent)
        for block in blocks:
            left[block] = leaving
        if horizon.sent == horizon.done:
            self._rested(leaving)
        else:
            self._cooling[leaving] = None
            self.num_cooling += len(blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """All of these are here, and somebody wants them."""
        left = self._left
        gone = Counter(map(left.__getitem__, blocks))
        for block in blocks:
            left[block] = None
        for leaving, count in gone.items():
            assert leaving is not None, "a block is taken from the shelf and is not on it"
            self._lost(leaving, count)

    def num_idle_of(self, blocks: list[int]) -> int:
        left = self._left
        return sum(leaving.is_idle for block in blocks if (leaving := left[block]) is not None)

    def settle(self) -> None:
        """To be called when `horizon.done` has moved."""
        while self._cooling:
            leaving = next(iter(self._cooling))
            if leaving.plan > self._horizon.done:
                return
            del self._cooling[leaving]
            self.num_cooling -= leaving.num_blocks
            self._rested(leaving)

    def oldest(self, count: int) -> list[int]:
        """Takes so many idle ones, or all there are, in the order in which they were left."""
        taken: list[int] = []
        left = self._left
        while self._idle and len(taken) < count:
            leaving = next(iter(self._idle))
            listed, wanted = leaving.listed, count - len(taken)
            found: list[int] = []
            if len(listed) == leaving.num_blocks:
                found = listed[: -wanted - 1 : -1]
                del listed[-wanted:]
            while listed and len(found) < min(wanted, leaving.num_blocks):
                if left[listed[-1]] is leaving:
                    found.append(listed[-1])
                del listed[-1]
            for block in found:
                left[block] = None
            self._lost(leaving, len(found))
            taken += found
        return taken

    def oldest_one(self) -> int | None:
        """As `oldest`, at less cost."""
        if not self._idle:
            return None
        leaving, left = next(iter(self._idle)), self._left
        while left[block := leaving.listed.pop()] is not leaving:
            pass
        left[block] = None
        self._lost(leaving, 1)
        return block

    def listed(self) -> Iterator[tuple[int, bool]]:
        """All, in the order in which they are given up, and whether they are idle. To look at."""
        for leaving in [*self._idle, *self._cooling]:
            yield from ((b, leaving.is_idle) for b in reversed(leaving.listed) if self._left[b] is leaving)

    def _rested(self, leaving: Leaving) -> None:
        leaving.is_idle = True
        self._idle[leaving] = None
        self.num_idle += leaving.num_blocks

    def _lost(self, leaving: Leaving, count: int) -> None:
        leaving.num_blocks -= count
        if leaving.is_idle:
            self.num_idle -= count
        else:
            self.num_cooling -= count
        if not leaving.num_blocks:
            del (self._idle if leaving.is_idle else self._cooling)[leaving]
        elif len(leaving.listed) > 2 * leaving.num_blocks + SLACK:
            left = self._left
            leaving.listed = [block for block in leaving.listed if left[block] is leaving]
