"""Which blocks hold what, by name, and in which order those that nobody uses are given up."""

from collections import deque
from collections.abc import Iterable

from blockyard.services.scheduler.kv_cache.free_block_queue import Shelf
from blockyard.services.scheduler.kv_cache.id_pool import Horizon

FIND_AT_ONCE = 256  # names


class PrefixIndex:
    """Names of full blocks. A block without users stays findable until it is reclaimed, least recently used first.

    One that was left under a plan in flight may be found, and read by later plans, at once; it cools until that
    plan's result is in, before which nobody may write it.
    """

    def __init__(self, num_blocks: int, horizon: Horizon) -> None:
        self.shelf = Shelf(num_blocks, horizon)  # those without users
        self._block_of: dict[bytes, int] = {}
        self.get = self._block_of.get  # the block of a name
        self.has_none = self._block_of.keys().isdisjoint  # of some names
        self._name_of: dict[int, bytes] = {}
        self.has = self._name_of.__contains__  # whether a block has a name
        self._news: dict[int, bytes] = {}  # what the worker has not been told

    def find(self, names: list[bytes], most: int) -> list[int]:
        """Blocks of the first names, `most` of them, up to the first that is not here."""
        found: list[int] = []
        end = min(most, len(names))
        block_of = self._block_of.__getitem__
        try:  # in slices: a long prompt is looked up at C's speed, and one that is not here not at all
            for first in range(0, end, FIND_AT_ONCE):
                found += [*map(block_of, names[first : min(first + FIND_AT_ONCE, end)])]
        except KeyError:
            for name in names[len(found) : end]:  # ends within the slice
                if (block := self.get(name)) is None:
                    break
                found.append(block)
        return found

    def name_of(self, block: int) -> bytes | None:
        return self._name_of.get(block)

    def put_new(self, blocks: list[int], names: list[bytes]) -> None:
        """As `put`, of names that nobody has."""
        self._block_of.update(zip(names, blocks, strict=True))
        named = dict(zip(blocks, names, strict=True))
        self._name_of.update(named)
        if self._news:
            self._news.update(named)
        else:
            self._news = named

    def put(self, block: int, name: bytes) -> bool:
        """Makes a block findable for plans not yet sent. False if another one has that name."""
        if self._block_of.setdefault(name, block) != block:
            return False
        self._name_of[block] = name
        self._news[block] = name
        return True

    def adopt(self, blocks: Iterable[int], names: list[bytes]) -> list[int]:
        """Takes over what a worker's blocks hold, oldest first. Returns the blocks it took."""
        taken = [block for block, name in zip(blocks, names, strict=True) if self.put(block, name)]
        self.shelf.put(taken)
        self._news.clear()  # it comes from the worker
        return taken

    def drop(self, block: int) -> bool:
        """Forgets a name. True if nobody used the block, which is the caller's then and still to be rested."""
        name = self._name_of.pop(block, None)
        if name is None:
            return False
        del self._block_of[name]
        self._news.pop(block, None)
        if not self.shelf.has(block):
            return False
        self.shelf.take((block,))
        return True

    def touch(self, name: bytes) -> int | None:
        """A block was left that holds the same as the one with this name: that one counts as left now, too."""
        block = self._block_of.get(name)
        if block is not None and self.shelf.has(block):
            self.shelf.take((block,))
            self.shelf.put((block,))
        return block

    def reclaim_all(self, count: int) -> tuple[list[int], list[bytes]]:
        """As `reclaim`, so many at once or all there are: blocks and their names, in the order they were left in."""
        blocks = self.shelf.oldest(count)
        names = [*map(self._name_of.pop, blocks)]
        deque(map(self._block_of.pop, names), maxlen=0)  # thousands at a time, at C's speed
        if self._news:
            for block in blocks:
                self._news.pop(block, None)
        return blocks, names

    def reclaim(self) -> tuple[int, bytes] | None:
        """Gives up the block that was left first, and its name."""
        block = self.shelf.oldest_one()
        if block is None:
            return None
        name = self._name_of.pop(block)
        del self._block_of[name]
        self._news.pop(block, None)
        return block, name

    def take_news(self) -> dict[int, bytes]:
        news, self._news = self._news, {}
        return news
