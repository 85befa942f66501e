"""The running choices as the host knows them: their rows, what they ask of the sampler, the names of their blocks."""

from collections import deque

import numpy as np
import numpy.typing as npt

from blockyard.services.gpu_worker.kv.block_copies import copy_blocks
from blockyard.services.gpu_worker.kv.block_hashes import BlockHashes
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.kv.transfers import Transfers
from blockyard.services.gpu_worker.sampling.sampler import Sampler
from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.kv_transfer.host_store import BlockStore
from blockyard.shared.messages import FinishReason, Geometry, SlotResult, StepPlan

Ints = npt.NDArray[np.int64]


class Batch:
    """Changes with every plan twice: `apply` when it is launched, `settle` when its results are known.

    Between the two, later plans may be applied: a slot that a result speaks of may have ended, or have a new owner.
    """

    def __init__(self, geometry: Geometry, pool: KVPool, store: BlockStore | None = None) -> None:
        """`store`: host memory for blocks, if there is any."""
        self.block_hashes = BlockHashes(pool.num_blocks)
        self.transfers = Transfers(self.block_hashes, geometry.block_size, store)
        self.sampler = Sampler(geometry.vocab_size, geometry.eos_token_ids, pool.device)
        self._eos = frozenset(geometry.eos_token_ids)
        self._geometry, self._pool = geometry, pool
        self.reset(0)

    def reset(self, num_slots: int) -> None:
        """Drops all slots; KV and its names stay."""
        shape = self._geometry
        self.block_hashes.readmit_all()
        self.transfers.reset()
        self.slots = Slots(num_slots, shape.max_model_len, shape.block_size, shape.vocab_size, shape.num_blocks)
        self.sampler.reset(num_slots)
        self._blocks_of_ended: dict[int, Ints] = {}  # blocks by owner, until the plan that ended it is settled
        self._ended_owners: deque[list[int]] = deque()  # owners that plans ended, a list a plan
        self._failed_blocks: list[tuple[int, Ints]] = []  # slots and blocks, of the plan that is being settled

    def apply(self, plan: StepPlan) -> list[SlotResult]:
        """Ends, starts and blocks; returns what is said, once, of slots that were to run and cannot."""
        slots = self.slots
        endings: list[int] = []
        for slot in [*plan.ends, *(start.slot for start in plan.starts)]:
            if slot in slots.slots:
                endings.append(owner := int(slots.owners[slot]))
                self._blocks_of_ended[owner] = self.blocks_of(slot).copy()
            slots.end(slot)
            self.sampler.end(slot)
        self._ended_owners.append(endings)
        self.transfers.begin(plan)
        if plan.copies:
            copy_blocks(self._pool, self.block_hashes, plan.copies)
        for start in plan.starts:
            lacks_kv = self.transfers.starts_without_kv(start)
            if slots.start(start):
                if lacks_kv:
                    slots.fail(start.slot)
                problem = self.sampler.start(start)
                if problem:
                    slots.fail(start.slot, problem)
        for added in plan.blocks:
            slots.add_blocks(added)
        self.transfers.extend(plan.blocks)
        errors = slots.errors
        if not errors:
            return []
        broken = [r.slot for r in plan.runs if r.slot in errors]
        return [SlotResult(s, [], 0, finish=FinishReason.FAILED, detail=errors.pop(s)) for s in broken]

    def complete(self, plan: StepPlan, results: list[SlotResult]) -> None:
        """The plan has run: its names hold, but for those of slots that failed."""
        hashes, slots = self.block_hashes, self.slots
        failed = {r.slot for r in results if r.finish is FinishReason.FAILED}
        for slot in plan.ends:
            hashes.readmit(slot)
        for start in plan.starts:
            hashes.readmit(start.slot)
            if start.slot in failed or start.slot in slots.errors:
                hashes.exclude(start.slot, start.blocks)
        for slot in self.transfers.slots_without_kv:
            hashes.exclude(slot, self.blocks_of(slot).tolist())
        hashes.add(plan.full_blocks)
        for slot in failed:
            if slot in slots.slots:
                hashes.exclude(slot, self.blocks_of(slot).tolist())
        for slot, blocks in self._failed_blocks:
            hashes.exclude(slot, blocks.tolist())
        self._failed_blocks.clear()
        for owner in self._ended_owners.popleft():
            del self._blocks_of_ended[owner]

    def drop(self, slot: int, owner: int) -> None:
        """After logits that are not numbers: what it wrote must not reach the next owner of its blocks.

        To be called before any later plan is launched than those in flight: they may not touch the blocks of others.
        """
        blocks = self._blocks_of_ended.get(owner)
        if blocks is None:
            self.slots.fail(slot)
            blocks = self.blocks_of(slot)
        self._failed_blocks.append((slot, blocks))
        self._pool.scrub(blocks)

    def recount(self, slot: int) -> None:
        """The sampler's counts of a slot's tokens begin anew, from what is known."""
        table = self.slots
        state, ids = table.slots[slot], table.token_ids[slot, : table.num_tokens[slot]]
        self.sampler.recount(slot, state.sampling, ids, state.num_prompt_tokens)

    def finish_reason_of(self, slot: int, token: int, known: int) -> tuple[FinishReason | None, int | None]:
        """Whether this token, with which so many are known, ends the choice, and the stop id that did."""
        state = self.slots.slots[slot]
        if token in self._eos and not state.sampling.ignore_eos:
            return FinishReason.STOP, None
        if token in state.stop_ids:
            return FinishReason.STOP, token
        return (FinishReason.LENGTH if known >= state.max_num_tokens else None), None

    def blocks_of(self, slot: int) -> Ints:
        return self.slots.tables[slot, : self.slots.num_blocks[slot]]
