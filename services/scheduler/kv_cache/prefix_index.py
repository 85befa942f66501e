"""Which blocks hold what, by block_hash, and in which order those that nobody uses are given up."""

from collections import deque
from collections.abc import Iterable

from blockyard.services.scheduler.kv_cache.free_block_queue import FreeBlockQueue
from blockyard.services.scheduler.kv_cache.id_pool import PlanClock

FIND_AT_ONCE = 256  # hashes


class PrefixIndex:
    """Names of full blocks. A block without users stays findable until it is reclaimed, least recently used first.

    One that was left under a plan in flight may be found, and read by later plans, at once; it cools until that
    plan's result is in, before which nobody may write it.
    """

    def __init__(self, num_blocks: int, plan_clock: PlanClock) -> None:
        self.free_queue = FreeBlockQueue(num_blocks, plan_clock)  # those without users
        self._block_of: dict[bytes, int] = {}
        self.get = self._block_of.get  # the block of a block_hash
        self.has_none = self._block_of.keys().isdisjoint  # of some hashes
        self._hash_of: dict[int, bytes] = {}
        self.has = self._hash_of.__contains__  # whether a block has a block_hash
        self._new: dict[int, bytes] = {}  # what the worker has not been told

    def find(self, hashes: list[bytes], most: int) -> list[int]:
        """Blocks of the first hashes, `most` of them, up to the first that is not here."""
        found: list[int] = []
        end = min(most, len(hashes))
        block_of = self._block_of.__getitem__
        try:  # in slices: a long prompt is looked up at C's speed, and one that is not here not at all
            for first in range(0, end, FIND_AT_ONCE):
                found += [*map(block_of, hashes[first : min(first + FIND_AT_ONCE, end)])]
        except KeyError:
            for block_hash in hashes[len(found) : end]:  # ends within the slice
                if (block := self.get(block_hash)) is None:
                    break
                found.append(block)
        return found

    def hash_of(self, block: int) -> bytes | None:
        return self._hash_of.get(block)

    def insert_all(self, blocks: list[int], hashes: list[bytes]) -> None:
        """As `put`, of hashes that nobody has."""
        self._block_of.update(zip(hashes, blocks, strict=True))
        hashed = dict(zip(blocks, hashes, strict=True))
        self._hash_of.update(hashed)
        if self._new:
            self._new.update(hashed)
        else:
            self._new = hashed

    def insert(self, block: int, block_hash: bytes) -> bool:
        """Makes a block findable for plans not yet sent. False if another one has that block_hash."""
        if self._block_of.setdefault(block_hash, block) != block:
            return False
        self._hash_of[block] = block_hash
        self._new[block] = block_hash
        return True

    def restore(self, blocks: Iterable[int], hashes: list[bytes]) -> list[int]:
        """Takes over what a worker's blocks hold, oldest first. Returns the blocks it took."""
        taken = [block for block, block_hash in zip(blocks, hashes, strict=True) if self.insert(block, block_hash)]
        self.free_queue.put(taken)
        self._new.clear()  # it comes from the worker
        return taken

    def remove(self, block: int) -> bool:
        """Forgets a block_hash. True if nobody used the block, which is the caller's then and still to be rested."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return False
        del self._block_of[block_hash]
        self._new.pop(block, None)
        if not self.free_queue.has(block):
            return False
        self.free_queue.take((block,))
        return True

    def touch(self, block_hash: bytes) -> int | None:
        """A block was left that holds the same as the one with this block_hash: that one counts as left now, too."""
        block = self._block_of.get(block_hash)
        if block is not None and self.free_queue.has(block):
            self.free_queue.take((block,))
            self.free_queue.put((block,))
        return block

    def evict(self, count: int) -> tuple[list[int], list[bytes]]:
        """As `reclaim`, so many at once or all there are: blocks and their hashes, in the order they were left in."""
        blocks = self.free_queue.pop(count)
        hashes = [*map(self._hash_of.pop, blocks)]
        deque(map(self._block_of.pop, hashes), maxlen=0)  # thousands at a time, at C's speed
        if self._new:
            for block in blocks:
                self._new.pop(block, None)
        return blocks, hashes

    def evict_one(self) -> tuple[int, bytes] | None:
        """Gives up the block that was left first, and its block_hash."""
        block = self.free_queue.pop_one()
        if block is None:
            return None
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self._new.pop(block, None)
        return block, block_hash

    def take_new(self) -> dict[int, bytes]:
        new, self._new = self._new, {}
        return new
