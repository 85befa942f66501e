"""Moves blocks between the pool and host memory, tracks slots of failed fetches, and copies blocks within the pool.

A forked sequence needs its own copy of the last block if that is not full.
"""

from collections.abc import Iterable

import numpy as np
import torch

from blockyard.services.gpu_worker.kv.block_hashes import BlockHashes
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.kv_transfer.host.host_store import BlockStore
from blockyard.shared.messages import BlockCopy, BlockFetch, BlockSave, SlotBlocks, SlotStart, StepPlan

AT_ONCE = 64  # blocks; bounds the temporary memory


class HostSwap:
    """Slots that start on blocks of a failed fetch, or on blocks of another worker that have not landed, produce no
    results until the scheduler ends them.

    The scheduler gets these blocks with the plan's result and computes their sequences again.
    """

    def __init__(self, block_hashes: BlockHashes, block_size: int, store: BlockStore | None) -> None:
        self.slots_without_kv: set[int] = set()
        self._block_hashes, self._block_size, self._store = block_hashes, block_size, store
        self._blocks_without_kv: set[int] = set()  # blocks without the contents that plans expect
        self._failed: dict[int, set[int]] = {}  # blocks by number of the plan that fetched or read them

    def reset(self) -> None:
        """Drops the state of slots; host memory keeps its blocks."""
        if self._store is not None:
            self._store.drain()
        self.slots_without_kv.clear()
        self._blocks_without_kv.clear()
        self._failed.clear()

    def begin(self, plan: StepPlan) -> None:
        """Saves and fetches a plan's blocks. Call it before its slots start."""
        self.slots_without_kv.difference_update(plan.ends)
        if plan.saves:
            self._save(plan.saves)
        if plan.fetches and (failed := self._fetch(plan.fetches)):
            self._failed[plan.number] = set(failed)
        for copy in plan.copies:
            self._blocks_without_kv.discard(copy.dst)
            if copy.src in self._blocks_without_kv:
                self._blocks_without_kv.add(copy.dst)

    def pop_failed_fetches(self, plan: StepPlan) -> list[int]:
        """Blocks that a plan failed to fetch, or has read without their KV, for its result."""
        return sorted(self._failed.pop(plan.number, ()))

    def expect(self, blocks: list[int]) -> None:
        """Another worker writes these blocks."""
        self._blocks_without_kv.update(blocks)

    def landed(self, blocks: list[int]) -> None:
        self._blocks_without_kv.difference_update(blocks)

    def starts_without_kv(self, plan: StepPlan, start: SlotStart) -> bool:
        """Whether a slot starts on blocks without KV. The blocks that it writes are invalid then, too."""
        num_found = -(-start.num_computed // self._block_size)
        fresh = start.blocks[num_found:]
        if self._blocks_without_kv.isdisjoint(start.blocks[:num_found]):
            self._blocks_without_kv.difference_update(fresh)
            return False
        missing = self._blocks_without_kv.intersection(start.blocks[:num_found])
        self._failed.setdefault(plan.number, set()).update(missing)
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


@torch.inference_mode()
def copy_blocks(pool: KVPool, names: BlockHashes, copies: list[BlockCopy]) -> None:
    """Copies in all layers, on the stream of steps: after earlier plans and before this plan's runs.

    No block is both source and destination. Blocks outside of the pool are skipped: their slots fail at their start.
    """
    known = [(c.src, c.dst) for c in copies if 0 <= c.src < pool.num_blocks and 0 <= c.dst < pool.num_blocks]
    for first in range(0, len(known), AT_ONCE):
        pairs = np.array(known[first : first + AT_ONCE], np.int64).T
        names.invalidate(pairs[1])
        pool.copy(pairs)
