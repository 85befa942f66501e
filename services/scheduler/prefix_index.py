"""Which blocks hold what, by name, and in which order those that nobody uses are given up."""

from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import islice
from typing import cast

from blockyard.services.scheduler.id_pool import Horizon

FIND_AT_ONCE = 256  # names


class PrefixIndex:
    """Names of full blocks. A block without users stays findable until it is reclaimed, least recently used first.

    One that was left under a plan in flight may be found, and read by later plans, at once; it cools until that
    plan's result is in, before which nobody may write it.
    """

    def __init__(self, horizon: Horizon) -> None:
        self._horizon = horizon
        self._block_of: dict[bytes, int] = {}
        self.get = self._block_of.get  # the block of a name
        self.named = self._block_of.__contains__
        self._name_of: dict[int, bytes] = {}
        self.has = self._name_of.__contains__  # whether a block has a name
        self._cooling: OrderedDict[int, int] = OrderedDict()  # block -> last plan sent when it was left
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._news: dict[int, bytes] = {}  # what the worker has not been told

    @property
    def num_cooling(self) -> int:
        return len(self._cooling)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def find(self, names: list[bytes], most: int) -> list[int]:
        """Blocks of the first names, `most` of them, up to the first that is not here."""
        found: list[int] = []
        block_of = self._block_of
        first, end = 0, min(most, len(names))
        while first < end:  # in slices: a long prompt is looked up at C's speed, and one that is not here not at all
            blocks = [*map(block_of.get, names[first : min(first + FIND_AT_ONCE, end)])]
            if None in blocks:
                del blocks[blocks.index(None) :]
                end = first
            found += cast("list[int]", blocks)
            first += FIND_AT_ONCE
        return found

    def name_of(self, block: int) -> bytes | None:
        return self._name_of.get(block)

    def put_new(self, blocks: list[int], names: list[bytes]) -> None:
        """As `put`, of names that nobody has."""
        self._block_of.update(zip(names, blocks, strict=True))
        named = dict(zip(blocks, names, strict=True))
        self._name_of.update(named)
        self._news.update(named)

    def put(self, block: int, name: bytes) -> bool:
        """Makes a block findable for plans not yet sent. False if another one has that name."""
        if self._block_of.setdefault(name, block) != block:
            return False
        self._name_of[block] = name
        self._news[block] = name
        return True

    def adopt(self, blocks: Iterable[int], names: list[bytes]) -> list[int]:
        """Takes over what a worker's blocks hold, oldest first. Returns the blocks it took."""
        for block, name in zip(blocks, names, strict=True):
            if self.put(block, name):
                self._idle[block] = None
        self._news.clear()  # it comes from the worker
        return list(self._idle)

    def drop(self, block: int) -> bool:
        """Forgets a name. True if nobody used the block, which is the caller's then and still to be rested."""
        name = self._name_of.pop(block, None)
        if name is None:
            return False
        del self._block_of[name]
        self._news.pop(block, None)
        if block in self._idle:
            del self._idle[block]
            return True
        return self._cooling.pop(block, None) is not None

    def wake(self, block: int) -> None:
        """A block without users gets one."""
        self.wake_all((block,))

    def wake_all(self, blocks: Iterable[int]) -> None:
        idle, cooling = self._idle, self._cooling
        if cooling:
            blocks = list(blocks)
            cool = {block for block in blocks if block in cooling}
            deque(map(cooling.pop, cool), maxlen=0)
            blocks = [block for block in blocks if block not in cool]
        deque(map(idle.pop, blocks), maxlen=0)  # thousands at a time, at C's speed

    def rest(self, block: int) -> None:
        """The last user of a named block has left it."""
        self.rest_all((block,))

    def rest_all(self, blocks: Iterable[int]) -> None:
        if self._horizon.sent == self._horizon.done:
            self._idle.update(dict.fromkeys(blocks))
        else:
            self._cooling.update(dict.fromkeys(blocks, self._horizon.sent))

    def touch(self, name: bytes) -> int | None:
        """A block was left that holds the same as the one with this name: that one counts as left now, too."""
        block = self._block_of.get(name)
        if block is not None and (block in self._idle or block in self._cooling):
            self.wake(block)
            self.rest(block)
        return block

    def settle(self) -> None:
        """To be called when `horizon.done` has moved."""
        while self._cooling:
            block = next(iter(self._cooling))
            if self._cooling[block] > self._horizon.done:
                return
            del self._cooling[block]
            self._idle[block] = None

    def reclaim_all(self, count: int) -> dict[int, bytes]:
        """As `reclaim`, so many at once or all there are: names by block, in the order in which they were left."""
        idle, name_of, block_of = self._idle, self._name_of, self._block_of
        given_up = {block: name_of.pop(block) for block in islice(idle, count)}
        for block, name in given_up.items():
            del idle[block], block_of[name]
        if self._news:
            for block in given_up:
                self._news.pop(block, None)
        return given_up

    def reclaim(self) -> tuple[int, bytes] | None:
        """Gives up the block that was left first, and its name."""
        if not self._idle:
            return None
        block, _ = self._idle.popitem(last=False)
        name = self._name_of.pop(block)
        del self._block_of[name]
        self._news.pop(block, None)
        return block, name

    def num_idle_of(self, blocks: list[int]) -> int:
        return sum(map(self._idle.__contains__, blocks))

    def take_news(self) -> dict[int, bytes]:
        news, self._news = self._news, {}
        return news
