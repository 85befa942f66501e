"""What a plan grants to those that run already: a token to each that decodes, and blocks for it."""

from blockyard.services.scheduler.batch.plan_builder import PlanBuilder
from blockyard.services.scheduler.lifecycle import Lifecycle
from blockyard.services.scheduler.sequences.requests import Phase, RunningSequence
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup
from blockyard.shared.messages import SlotBlocks


class DecodePlanner:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def schedule(self, group: WorkerGroup, builder: PlanBuilder) -> list[RunningSequence]:
        """Grants each decoding seat one token, oldest first. Returns the seats that are in prefill.

        Those in the lane are in the plan once `add_decode_batch` is called.
        """
        decode_batch = group.decode_batch
        fits = len(group.running) <= builder.token_budget
        if not fits:
            decode_batch.clear()  # the oldest ones run
        elif len(decode_batch):
            self._extend_decode_batch(group, builder)
        partial_prefills: list[RunningSequence] = []
        for running in decode_batch.outside.copy():
            if running.sequence.phase is not Phase.RUNNING:
                continue  # preempted for one before it
            num_scheduled_tokens = running.num_scheduled_tokens
            if num_scheduled_tokens < running.prefill_end:
                if num_scheduled_tokens < running.table.capacity or self._extend(group, builder, running):
                    partial_prefills.append(running)
            elif num_scheduled_tokens < running.max_scheduled_tokens and builder.token_budget:
                if num_scheduled_tokens == running.table.capacity and not self._extend(group, builder, running):
                    continue
                if fits and decode_batch.accepts(running):
                    decode_batch.join(running, builder.record.number)
                else:
                    builder.schedule_decode(running)
        builder.token_budget -= len(decode_batch)
        return partial_prefills

    def add_decode_batch(self, group: WorkerGroup, builder: PlanBuilder) -> None:
        """The lane runs in this plan, which is about to be sent."""
        if len(group.decode_batch):
            runs, builder.record.rows = group.decode_batch.advance_all(builder.record.number)
            builder.runs = runs + builder.runs

    def _extend_decode_batch(self, group: WorkerGroup, builder: PlanBuilder) -> None:
        """Blocks for seats of the lane.

        Where they are scarce these seats are looked at with all others, in the order in which these get blocks.
        """
        decode_batch, kv_cache = group.decode_batch, group.kv_cache
        is_scarce = kv_cache.blocks.num_free < decode_batch.num_due + len(decode_batch.outside)
        at_end = builder.record.filled = decode_batch.take_due(leave=is_scarce or kv_cache.window.size is not None)
        extended = [
            running
            for running in at_end
            if decode_batch.has(running) and running.num_scheduled_tokens == running.table.capacity
        ]
        for running, block in zip(extended, kv_cache.append_block_to_each(extended), strict=True):
            builder.blocks.append(SlotBlocks(running.slot, [block]))

    def _extend(self, group: WorkerGroup, builder: PlanBuilder, running: RunningSequence) -> bool:
        """One more block for a seat. Where there is none, younger seats are preempted until enough will be free.

        What they held rests while plans are in flight: False means not in this plan.
        """
        kv_cache, pool = group.kv_cache, group.kv_cache.blocks
        block = kv_cache.append_block(running)
        if block is None:
            builder.num_blocks_owed += 1
            while pool.num_free + pool.num_pending < builder.num_blocks_owed and group.running[-1] is not running:
                self._lifecycle.preempt(group, group.running[-1])
            block = kv_cache.append_block(running)
            if block is None:
                return False
            builder.num_blocks_owed -= 1
        builder.blocks.append(SlotBlocks(running.slot, [block]))
        return True
