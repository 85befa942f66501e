"""What plans move between the pool and host memory, and what becomes of slots whose blocks did not come."""

from collections.abc import Iterable

import numpy as np

from blockyard.services.gpu_worker.kv.block_hashes import BlockHashes
from blockyard.services.kv_transfer.host_store import BlockStore
from blockyard.shared.messages import BlockFetch, BlockSave, SlotBlocks, SlotStart, StepPlan


class Transfers:
    """A fetch that fails costs the slots that began on its blocks: they stay silent until the scheduler ends them.

    It is told which blocks those are, and has their choices computed.
    """

    def __init__(self, block_hashes: BlockHashes, block_size: int, store: BlockStore | None) -> None:
        self.slots_without_kv: set[int] = set()  # slots
        self._block_hashes, self._block_size, self._store = block_hashes, block_size, store
        self._blocks_without_kv: set[int] = set()  # blocks that do not hold what plans say
        self._failed: dict[int, list[int]] = {}  # blocks, by number of the plan that was to fetch them

    def reset(self) -> None:
        """Slots are gone; what is in host memory stays."""
        if self._store is not None:
            self._store.drain()
        self.slots_without_kv.clear()
        self._blocks_without_kv.clear()
        self._failed.clear()

    def begin(self, plan: StepPlan) -> None:
        """Before the plan's slots start."""
        self.slots_without_kv.difference_update(plan.ends)
        if plan.saves:
            self._save(plan.saves)
        if plan.fetches and (failed := self._fetch(plan.fetches)):
            self._failed[plan.number] = failed
        for copy in plan.copies:
            self._blocks_without_kv.discard(copy.dst)
            if copy.src in self._blocks_without_kv:
                self._blocks_without_kv.add(copy.dst)

    def pop_failed_fetches(self, plan: StepPlan) -> list[int]:
        """Blocks that a plan was to fetch and did not; for its result."""
        return self._failed.pop(plan.number, [])

    def starts_without_kv(self, start: SlotStart) -> bool:
        """Whether a slot begins on blocks that did not come. What it would write is as bad."""
        num_found = -(-start.num_computed // self._block_size)
        fresh = start.blocks[num_found:]
        if self._blocks_without_kv.isdisjoint(start.blocks[:num_found]):
            self._blocks_without_kv.difference_update(fresh)
            return False
        self.slots_without_kv.add(start.slot)
        self._blocks_without_kv.update(fresh)
        return True

    def extend(self, added: Iterable[SlotBlocks]) -> None:
        for more in added:
            if more.slot in self.slots_without_kv:
                self._blocks_without_kv.update(more.blocks)
            else:
                self._blocks_without_kv.difference_update(more.blocks)

    def _save(self, saves: list[BlockSave]) -> None:
        good = [save for save in saves if save.block not in self._blocks_without_kv]
        self._block_hashes.on_saved(saves, good)
        if self._store is not None and good:
            self._store.save([save.block for save in good], [save.host for save in good])

    def _fetch(self, fetches: list[BlockFetch]) -> list[int]:
        blocks = [fetch.block for fetch in fetches]
        self._block_hashes.invalidate(np.array(blocks, np.int64))
        good = [fetch for fetch in fetches if self._store is not None and self._block_hashes.has_host_block(fetch.host)]
        self._blocks_without_kv.difference_update(blocks)
        if self._store is not None and good:
            self._store.fetch([fetch.host for fetch in good], [fetch.block for fetch in good])
        failed = sorted(set(blocks) - {fetch.block for fetch in good})
        self._blocks_without_kv.update(failed)
        return failed
