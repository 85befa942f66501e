"""The KV blocks of one worker group: reference counts, free blocks and cached blocks."""

from collections.abc import Iterable, Sequence
from itertools import filterfalse

from blockyard.services.scheduler.kv_cache.host_tier import HostTier
from blockyard.services.scheduler.kv_cache.id_pool import IdPool
from blockyard.services.scheduler.kv_cache.prefix_index import PrefixIndex
from blockyard.services.scheduler.plan_pacer import PlanClock

MANY_BLOCKS = 32  # from so many on, loops in C are faster


class BlockPool:
    """Counts how many sequences and transfers hold each block; block tables and the ledger of transfers say which.

    Each block is in one place: held, uncached (in `uncached`), or cached without a holder (in `index`).
    Blocks without a holder are free, or pending while a plan in flight may still use them. Evicted ones go to `host`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        plan_clock: PlanClock,
        num_host_blocks: int = 0,
        watermark: float | None = None,
    ) -> None:
        """watermark: fraction of blocks that stay free when a sequence starts beside others; None: a hundredth."""
        self.num_ids = num_blocks
        self.block_size = block_size  # tokens
        self.uncached = IdPool(num_blocks, plan_clock)
        self.index = PrefixIndex(num_blocks, plan_clock)
        self._free_queue = self.index.free_queue
        self.host = HostTier(num_host_blocks, plan_clock)
        self._has_host = num_host_blocks > 0
        self.has_pending = self._has_host  # `free_pending` may have something to do
        self._holders = [0] * num_blocks
        self._watermark = max(1, num_blocks // 100) if watermark is None else int(num_blocks * watermark)

    @property
    def num_free(self) -> int:
        return self.uncached.num_free + self._free_queue.num_free

    @property
    def num_pending(self) -> int:
        return self.uncached.num_pending + self._free_queue.num_pending

    @property
    def num_used(self) -> int:
        return self.num_ids - self.num_free - self.num_pending

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_admissible(self) -> int:
        """Blocks that a new sequence may take beside others, once no block is pending."""
        return self.num_free + self.num_pending - self._watermark

    def admits(self, num_blocks: int, found: list[int], alone: bool) -> bool:
        """Whether a new sequence may take `num_blocks` besides the blocks found for it.

        Beside other sequences it leaves a few blocks free, or it would be the next to be preempted.
        """
        room = self.num_free - (0 if alone else self._watermark)
        if num_blocks + len(found) <= room:  # the usual case, without a look at each block
            return True
        return num_blocks <= room and num_blocks + self._free_queue.num_free_of(found) <= room

    def num_free_of(self, blocks: list[int]) -> int:
        """How many of these cached blocks count as free."""
        return self._free_queue.num_free_of(blocks)

    def holds(self, block_hash: bytes) -> bool:
        return self.index.get(block_hash) is not None or self.host.get(block_hash) is not None

    def take_one(self) -> int | None:
        block = self.uncached.take_one()
        if block is None:
            block = self._evict_one()
            if block is None:
                return None
        self._holders[block] = 1
        return block

    def take(self, count: int) -> list[int]:
        """The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        taken = self.uncached.take(min(count, self.uncached.num_free))
        if len(taken) < count:
            blocks, hashes = self.index.evict(count - len(taken))
            self.host.save_all(blocks, hashes)
            taken += blocks
        for block in taken:
            self._holders[block] = 1
        return taken

    def share(self, blocks: list[int]) -> None:
        """One more sequence or transfer holds these blocks, which are cached or have a holder."""
        holders = self._holders
        if unheld := [*filterfalse(holders.__getitem__, blocks)]:
            self._free_queue.take(unheld)
        for block in blocks:
            holders[block] += 1

    # transfers to and from other workers

    def reserve(self, count: int) -> list[int] | None:
        """Free blocks that another worker is going to write; None while there are too few.

        What they had cached is not saved to host memory: that copy is part of a plan, and the writer does not wait for
        plans of this worker. For the same reason nothing is reserved while copies wait for their plan.
        """
        if count > self.num_free or self.host.saves:
            return None
        taken = self.uncached.take(min(count, self.uncached.num_free))
        taken += self.index.evict(count - len(taken))[0] if len(taken) < count else []
        for block in taken:
            self._holders[block] = 1
        return taken

    def keep_named(self, blocks: Iterable[int]) -> None:
        """A plan was sent that tells the worker hashes of these blocks. Until its result none is reserved.

        The worker adds the hashes when the plan completes, and a transfer may have written the blocks by then.
        """
        unheld = [block for block in blocks if self._free_queue.has(block)]
        self._free_queue.take(unheld)
        self._free_queue.put(unheld[::-1])
        self.has_pending = True

    def hold_open(self, blocks: list[int]) -> None:
        """Holds blocks of a newly attached worker, which may be in use by transfers that began before."""
        cached = [block for block in blocks if self.index.has(block)]
        self.share(cached)
        new = [block for block in blocks if not self._holders[block]]
        self.uncached.remove(new)
        for block in {*blocks}.difference(cached):
            self._holders[block] += 1

    def land(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Blocks that a transfer holds were written by another worker: they are cached."""
        self.index.insert_each(blocks, hashes)

    def release(self, blocks: list[int], hashes: Sequence[bytes]) -> None:
        """One holder less for these blocks. `hashes` are of the first of them, as far as sent plans fill them.

        The last block of a chain is evicted first: it is useless without the blocks before it.
        """
        holders, index, has = self._holders, self.index, self.index.has
        self.has_pending = True
        if len(blocks) >= MANY_BLOCKS and self._release_alike(blocks, len(hashes)):
            return
        uncached: list[int] = []
        kept: list[int] = []  # in the order of eviction
        for i in range(len(blocks) - 1, -1, -1):
            block = blocks[i]
            holders[block] = left = holders[block] - 1
            if left:
                continue
            if has(block):
                kept.append(block)
                continue
            if i < len(hashes):
                self._free_queue.put(kept)  # before the block that is touched
                kept = []
                if index.touch(hashes[i]) is None and index.insert(block, hashes[i]):
                    kept.append(block)
                    continue
            uncached.append(block)
        self._free_queue.put(kept)
        if uncached:
            self.uncached.release(uncached)

    def _release_alike(self, blocks: list[int], num_hashed: int) -> bool:
        """Releases many blocks at C speed, in the two usual cases; False if it is another one, and nothing was done.

        Either each of them has a further holder, or none has one and the first `num_hashed` blocks are cached.
        """
        holders, has = self._holders, self.index.has
        before = {*map(holders.__getitem__, blocks)}
        is_last = before == {1}
        if len({*blocks}) < len(blocks) or not (all(map(has, blocks[:num_hashed])) if is_last else min(before) > 1):
            return False
        for block in blocks:
            holders[block] -= 1
        if is_last:
            self._free_queue.put([*filter(has, reversed(blocks))])
            if uncached := [*filterfalse(has, reversed(blocks))]:
                self.uncached.release(uncached)
        return True

    def invalidate(self, blocks: list[int]) -> None:
        """The contents of these blocks are wrong: they are cached no longer."""
        self.uncached.release([block for block in blocks if self.index.remove(block)])
        self.has_pending = True

    def restore(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Takes over the cached blocks of a newly attached worker."""
        self.uncached.remove(self.index.restore(blocks, hashes))

    def free_pending(self) -> None:
        """To be called after each completed plan."""
        if self.uncached.num_pending:
            self.uncached.free_pending()
        if self._free_queue.num_pending:
            self._free_queue.free_pending()
        if self._has_host:
            self.host.free_pending()
        self.has_pending = self._has_host or self.uncached.num_pending > 0 or self._free_queue.num_pending > 0

    def _evict_one(self) -> int | None:
        given_up = self.index.evict_one()
        if given_up is None:
            return None
        self.host.save(*given_up)
        return given_up[0]
