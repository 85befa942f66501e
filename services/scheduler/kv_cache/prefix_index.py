"""Cached blocks by hash, and the queue of the ones that no sequence holds."""

from collections import deque
from collections.abc import Iterable

from blockyard.services.scheduler.kv_cache.free_block_queue import FreeBlockQueue
from blockyard.services.scheduler.plan_pacer import PlanClock

FIND_AT_ONCE = 256  # hashes


class PrefixIndex:
    """Hashes of full blocks. A block without a holder stays cached until it is evicted, in LRU order.

    A block that was freed under a plan in flight can be found, and read by later plans, at once. It is pending until
    that plan has its result, and before that it is not evicted, because nothing may overwrite it.
    """

    def __init__(self, num_blocks: int, plan_clock: PlanClock) -> None:
        self.free_queue = FreeBlockQueue(num_blocks, plan_clock)  # cached blocks without a holder
        self._block_of: dict[bytes, int] = {}
        self.get = self._block_of.get  # the block with a hash
        self.has_none = self._block_of.keys().isdisjoint
        self._hash_of: dict[int, bytes] = {}
        self.has = self._hash_of.__contains__  # whether a block is cached
        self.new: dict[int, bytes] = {}  # hashes that the worker has not been told

    def find(self, hashes: list[bytes], most: int) -> list[int]:
        """The blocks of the first `most` hashes, up to the first one that is not cached."""
        found: list[int] = []
        end = min(most, len(hashes))
        if not end or self.get(hashes[0]) is None:  # the usual case where many groups are compared
            return found
        block_of = self._block_of.__getitem__
        try:  # in slices: a long prompt is looked up at C speed, and an unknown one stops at the first slice
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
        """Inserts hashes that are not cached: see `insert`."""
        self._block_of.update(zip(hashes, blocks, strict=True))
        hashed = dict(zip(blocks, hashes, strict=True))
        self._hash_of.update(hashed)
        if self.new:
            self.new.update(hashed)
        else:
            self.new = hashed

    def insert_each(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Inserts each of them: see `insert`. No block or hash is there twice."""
        if self.has_none(hashes):  # the usual case, at C speed
            self.insert_all(blocks, hashes)
            return
        for block, block_hash in zip(blocks, hashes, strict=True):
            self.insert(block, block_hash)

    def insert(self, block: int, block_hash: bytes) -> bool:
        """Caches a block under a hash, for plans that are not sent yet. False if another block has this hash."""
        if self._block_of.setdefault(block_hash, block) != block:
            return False
        self._hash_of[block] = block_hash
        self.new[block] = block_hash
        return True

    def restore(self, blocks: Iterable[int], hashes: list[bytes]) -> list[int]:
        """Takes over the cached blocks of a worker, oldest first. Returns the blocks taken."""
        taken = [block for block, block_hash in zip(blocks, hashes, strict=True) if self.insert(block, block_hash)]
        self.free_queue.put(taken)
        self.new.clear()  # the worker knows them
        return taken

    def remove(self, block: int) -> bool:
        """Drops a block's hash. True if no sequence held the block: the caller has to release it."""
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return False
        del self._block_of[block_hash]
        self.new.pop(block, None)
        if not self.free_queue.has(block):
            return False
        self.free_queue.take((block,))
        return True

    def touch(self, block_hash: bytes) -> int | None:
        """A second block with this content was freed: the cached one counts as just used. Returns that block."""
        block = self._block_of.get(block_hash)
        if block is not None and self.free_queue.has(block):
            self.free_queue.take((block,))
            self.free_queue.put((block,))
        return block

    def evict(self, count: int) -> tuple[list[int], list[bytes]]:
        """Evicts `count` blocks, or all. Returns blocks and hashes in the order of eviction: see `evict_one`."""
        blocks = self.free_queue.pop(count)
        hashes = [*map(self._hash_of.pop, blocks)]
        deque(map(self._block_of.pop, hashes), maxlen=0)  # thousands at a time, at C speed
        if self.new:
            for block in blocks:
                self.new.pop(block, None)
        return blocks, hashes

    def evict_one(self) -> tuple[int, bytes] | None:
        """Evicts the block that was freed first. Returns it with its hash."""
        block = self.free_queue.pop_one()
        if block is None:
            return None
        block_hash = self._hash_of.pop(block)
        del self._block_of[block_hash]
        self.new.pop(block, None)
        return block, block_hash

    def take_new(self) -> dict[int, bytes]:
        new, self.new = self.new, {}
        return new
