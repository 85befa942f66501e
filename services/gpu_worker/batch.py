"""The host state of the running sequences: slots, block hashes and KV transfers."""

from collections import deque

from blockyard.services.gpu_worker.arrays import Ints
from blockyard.services.gpu_worker.kv.block_hashes import BlockHashes
from blockyard.services.gpu_worker.kv.host_swap import HostSwap, copy_blocks
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.prompt_adapters.prompt_vectors import PromptVectors
from blockyard.services.gpu_worker.sampling.logits_steps import unsupported_reason
from blockyard.services.gpu_worker.slots import Slots
from blockyard.services.gpu_worker.step import InputVectors
from blockyard.services.gpu_worker.structured_output.matcher_processes import MatcherProcesses
from blockyard.services.kv_transfer.host.host_store import BlockStore
from blockyard.shared.messages import FinishReason, Geometry, SlotResult, SlotStart, StepPlan


class Batch:
    """The state of the batch. Each plan changes it twice: `apply` at its launch, `complete` with its results.

    Later plans may be applied in between, so the slot of a result may have ended or have a new owner.
    """

    def __init__(
        self,
        geometry: Geometry,
        pool: KVPool,
        store: BlockStore | None = None,
        matchers: MatcherProcesses | None = None,
        prompts: PromptVectors | None = None,
    ) -> None:
        """store: host memory for KV blocks, None without --swap-space. matchers: None for no structured output.
        prompts: None for no prompt adapters."""
        self.block_hashes = BlockHashes(pool.num_blocks)
        self.host_swap = HostSwap(self.block_hashes, geometry.block_size, store)
        self.matchers, self.prompts = matchers, prompts
        self._geometry, self._pool = geometry, pool
        self.reset(0)

    def reset(self, num_slots: int) -> None:
        """Drops all slots and keeps KV and block hashes."""
        shape = self._geometry
        self.block_hashes.readmit_all()
        self.host_swap.reset()
        sizes = (shape.max_model_len, shape.block_size, shape.vocab_size, shape.num_blocks, shape.num_extra_tokens)
        self.slots = Slots(num_slots, *sizes)
        if self.matchers is not None:
            self.matchers.reset(self.slots)
        self._blocks_of_ended: dict[int, Ints] = {}  # by owner, until the plan that ended it completes
        self._ended_owners: deque[list[int]] = deque()  # for each plan in flight: the owners that it ended
        self._failed_blocks: list[tuple[int, Ints]] = []  # (slot, blocks) of the plan that completes next

    def apply(self, plan: StepPlan) -> list[SlotResult]:
        """Applies the ends, starts, copies and blocks of a plan. Returns results of scheduled slots that failed."""
        slots = self.slots
        endings: list[int] = []
        for slot in [*plan.ends, *(start.slot for start in plan.starts)]:
            if slot in slots.slots:
                endings.append(owner := int(slots.owners[slot]))
                self._blocks_of_ended[owner] = self.blocks_of(slot).copy()
            slots.end(slot)
            if self.matchers is not None:
                self.matchers.end(slot)
        self._ended_owners.append(endings)
        self.host_swap.begin(plan)
        if plan.copies:
            copy_blocks(self._pool, self.block_hashes, plan.copies)
        for start in plan.starts:
            lacks_kv = self.host_swap.starts_without_kv(plan, start)
            if slots.start(start):
                if lacks_kv:
                    slots.fail(start.slot)
                if problem := self._problem_of(start):
                    slots.fail(start.slot, problem)
                elif self.matchers is not None and start.sampling.constraint is not None:
                    self.matchers.start(start)
        for added in plan.blocks:
            slots.add_blocks(added)
        self.host_swap.extend(plan.blocks)
        errors = slots.errors
        if not errors:
            return []
        broken = [r.slot for r in plan.runs if r.slot in errors]
        return [SlotResult(s, [], 0, finish=FinishReason.FAILED, detail=errors.pop(s)) for s in broken]

    def input_vectors(self, slots: Ints, positions: Ints, first_row: int = 0) -> InputVectors | None:
        """The inputs of virtual tokens in a step: see `PromptVectors.inputs`. None: it has none."""
        if self.prompts is None or not self.slots.num_prompted:
            return None
        return self.prompts.inputs(self.slots, slots, positions, first_row)

    def _problem_of(self, start: SlotStart) -> str:
        """Why a slot cannot run or be sampled; empty if it can."""
        sampling = start.sampling
        if self.prompts is not None and (problem := self.prompts.start(start)):
            return problem
        if sampling.constraint is not None and self.matchers is None:
            return "this worker makes no masks of structured output"
        return unsupported_reason(sampling, self.slots.slots[start.slot].vocab_size)

    def complete(self, plan: StepPlan, results: list[SlotResult]) -> None:
        """Adds the block hashes of a plan that has run, except for failed slots."""
        hashes, slots = self.block_hashes, self.slots
        failed = {r.slot for r in results if r.finish is FinishReason.FAILED}
        for slot in plan.ends:
            hashes.readmit(slot)
        for start in plan.starts:
            hashes.readmit(start.slot)
            if start.slot in failed or start.slot in slots.errors:
                hashes.exclude(start.slot, start.blocks)
        for slot in self.host_swap.slots_without_kv:
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

    def refuse(self, slots: Ints, detail: str) -> list[SlotResult]:
        """Fails slots before their step."""
        for slot in slots.tolist():
            self.slots.fail(slot)
        lengths = self.slots.num_computed[slots].tolist()
        columns = zip(slots.tolist(), lengths, strict=True)
        return [SlotResult(slot, [], length, FinishReason.FAILED, detail=detail) for slot, length in columns]

    def fail_slot(self, slot: int, owner: int) -> None:
        """Fails a slot that has logits that are not finite, and scrubs its blocks before another slot reads them.

        Call it before the next launch. Plans in flight do not touch these blocks, but later plans may.
        """
        blocks = self._blocks_of_ended.get(owner)
        if blocks is None:
            self.slots.fail(slot)
            blocks = self.blocks_of(slot)
        self._failed_blocks.append((slot, blocks))
        self._pool.scrub(blocks)

    def blocks_of(self, slot: int) -> Ints:
        return self.slots.tables[slot, : self.slots.num_blocks[slot]]
