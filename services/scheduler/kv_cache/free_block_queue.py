"""Cached blocks that no sequence holds, in LRU order: the block that was freed first is evicted first.

Blocks of a prompt are freed, and taken again, thousands at a time. So the queue orders batches of blocks that were
freed together. Each block knows the last batch it was in; its entries in older batches are stale.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from blockyard.services.scheduler.plan_pacer import PlanClock

SLACK = 16  # stale entries of a batch that are always tolerated


class FreedBatch:
    """Blocks that were freed together. `blocks` ends with the first to be evicted, and may have stale entries."""

    __slots__ = ("blocks", "is_free", "num_blocks", "plan")

    def __init__(self, blocks: Sequence[int], plan: int) -> None:
        self.blocks = [*reversed(blocks)]
        self.num_blocks = len(blocks)
        self.plan = plan  # the last plan sent when they were freed
        self.is_free = False  # that plan has its result

    def drop_stale(self, batch_of: "Sequence[FreedBatch | None]") -> None:
        self.blocks = [block for block in self.blocks if batch_of[block] is self]


class FreeBlockQueue:
    """Blocks are pending until the last plan sent when they were freed has its result. Then they are free."""

    def __init__(self, num_blocks: int, plan_clock: PlanClock) -> None:
        self.num_free = 0
        self.num_pending = 0
        self._plan_clock = plan_clock
        self._batch_of: list[FreedBatch | None] = [None] * num_blocks
        self.batch_of = self._batch_of.__getitem__  # None for a block that is not in the queue
        self._free: OrderedDict[FreedBatch, None] = OrderedDict()
        self._pending: OrderedDict[FreedBatch, None] = OrderedDict()

    def has(self, block: int) -> bool:
        return self._batch_of[block] is not None

    def put(self, blocks: Sequence[int]) -> None:
        """Adds blocks that no sequence holds any more, in the order of eviction."""
        if not blocks:
            return
        plan_clock, left = self._plan_clock, self._batch_of
        batch = FreedBatch(blocks, plan_clock.last_sent)
        for block in blocks:
            left[block] = batch
        if plan_clock.last_sent == plan_clock.last_completed:
            self._now_free(batch)
        else:
            self._pending[batch] = None
            self.num_pending += len(blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """Takes out these blocks, which are all in the queue: a sequence uses them again."""
        left = self._batch_of
        gone = Counter(map(left.__getitem__, blocks))
        for block in blocks:
            left[block] = None
        for batch, count in gone.items():
            assert batch is not None, "a block is taken from the queue and is not in it"
            self._remove(batch, count)

    def num_free_of(self, blocks: list[int]) -> int:
        left = self._batch_of
        return sum(batch.is_free for block in blocks if (batch := left[block]) is not None)

    def free_pending(self) -> None:
        """To be called after each completed plan."""
        while self._pending:
            batch = next(iter(self._pending))
            if batch.plan > self._plan_clock.last_completed:
                return
            del self._pending[batch]
            self.num_pending -= batch.num_blocks
            self._now_free(batch)

    def pop(self, count: int) -> list[int]:
        """Takes the `count` free blocks that were freed first, or all there are."""
        taken: list[int] = []
        left = self._batch_of
        while self._free and len(taken) < count:
            batch = next(iter(self._free))
            listed, wanted = batch.blocks, count - len(taken)
            found: list[int] = []
            if len(listed) == batch.num_blocks:
                found = listed[: -wanted - 1 : -1]
                del listed[-wanted:]
            while listed and len(found) < min(wanted, batch.num_blocks):
                if left[listed[-1]] is batch:
                    found.append(listed[-1])
                del listed[-1]
            for block in found:
                left[block] = None
            self._remove(batch, len(found))
            taken += found
        return taken

    def pop_one(self) -> int | None:
        """Pops one block, at less cost than `pop`."""
        if not self._free:
            return None
        batch, left = next(iter(self._free)), self._batch_of
        while left[block := batch.blocks.pop()] is not batch:
            pass
        left[block] = None
        self._remove(batch, 1)
        return block

    def _now_free(self, batch: FreedBatch) -> None:
        batch.is_free = True
        self._free[batch] = None
        self.num_free += batch.num_blocks

    def _remove(self, batch: FreedBatch, count: int) -> None:
        batch.num_blocks -= count
        if batch.is_free:
            self.num_free -= count
        else:
            self.num_pending -= count
        if not batch.num_blocks:
            del (self._free if batch.is_free else self._pending)[batch]
        elif len(batch.blocks) > 2 * batch.num_blocks + SLACK:
            batch.drop_stale(self._batch_of)
