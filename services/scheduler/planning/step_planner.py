"""Builds the plan of one step: decodes first, then prefills with the tokens that are left.

Call order: `plan` asks the `PrefillPlanner` for the next waiting sequence, schedules one token for each decoding
sequence, lets the `PrefillPlanner` fill the rest of the token budget, and writes the `StepPlan`.
"""

from collections.abc import Mapping

from blockyard.services.scheduler.batch.plan_builder import PlanBuilder
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.lifecycle.beam_sequences import BeamScheduler
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.lifecycle.parallel_sampling import ParallelSampling
from blockyard.services.scheduler.planning.encoder_planner import EncoderPlanner
from blockyard.services.scheduler.planning.fair_step_limiter import FairStepLimiter
from blockyard.services.scheduler.planning.prefill_planner import PrefillPlanner, slot_start
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Phase, RunningSequence, Sequence
from blockyard.shared.messages import SlotBlocks, StepPlan


class StepPlanner:
    def __init__(
        self,
        scheduler: int,
        prefills: PrefillPlanner,
        lifecycle: Lifecycle,
        waiting: WaitingQueue,
        parallel_sampling: ParallelSampling,
        beam_scheduler: BeamScheduler,
        fair: FairStepLimiter,
        groups: Mapping[int, WorkerGroup],
    ) -> None:
        """`scheduler`: this scheduler's incarnation."""
        self._scheduler, self._prefills, self._lifecycle, self._waiting = scheduler, prefills, lifecycle, waiting
        self._parallel_sampling, self._beam_scheduler, self._fair = parallel_sampling, beam_scheduler, fair
        self._encoders = EncoderPlanner(scheduler, prefills, waiting, groups)

    def plan(self, group: WorkerGroup, now: float) -> StepPlan | None:
        """The next plan of a group, or None if nothing can run in it now."""
        if not group.has_kv:
            return self._encoders.plan(group, now)
        if group.turns is None:
            return self._plan(group, now)
        for turn in group.turns.free():
            group.turns.begin(turn)
            if (plan := self._plan(group, now)) is not None:
                return plan
        return None

    def _plan(self, group: WorkerGroup, now: float) -> StepPlan | None:
        if group.kv_cache.hash_queue:
            group.kv_cache.hash_full_blocks()
        sequence = None  # the next waiting one, where the policy may favour it
        if self._waiting.num_sequences and self._waiting.policy.has_classes:
            sequence = self._prefills.next(group, now)
            if sequence is not None:
                self._prefills.preempt_for(group, sequence)
                if not sequence.request.is_batch_line:
                    self._prefills.preempt_batch_lines(group)
        builder = PlanBuilder(group.plan_clock.last_sent + 1, group.max_num_batched_tokens, now)
        # beams that continue with another token than their worker sampled start again in their slots
        restarts = {running: slot_start(group, running) for running in group.restarts} if group.restarts else {}
        has_decodes = self._divide_step(group, builder, sequence)
        preempted = self._beam_scheduler.preempt_stalled(group) if self._beam_scheduler.live else False
        if has_decodes and group.decode_batch.num_sequences:
            builder.add_decode_batch(*group.decode_batch.advance_all(builder.record.number))
        if not builder.runs:
            return self._plan(group, now) if preempted else None
        if restarts:
            builder.starts.extend(restarts[running] for running in group.end_restarted())
        return self._send(group, builder)

    def _divide_step(self, group: WorkerGroup, builder: PlanBuilder, sequence: Sequence | None) -> bool:
        """Schedules decodes, then prefills. Returns whether the plan has decodes.

        Where the policy favours `sequence`, it gets a plan without the prefills of higher classes, and without decodes
        if these would double the time of the step.
        """
        prefills, fair = self._prefills, self._fair
        if sequence is None or not fair.excludes_other_prefills(group, sequence):
            unfinished = self._schedule_decodes(group, builder)
            if unfinished or self._waiting.num_sequences:
                prefills.schedule(group, builder, unfinished)
            return True
        excludes_decodes = fair.excludes_decodes(group)
        unfinished = [] if excludes_decodes else self._schedule_decodes(group, builder)
        if prefills.schedule_first(group, builder, sequence):
            return not excludes_decodes
        prefills.schedule(group, builder, self._schedule_decodes(group, builder) if excludes_decodes else unfinished)
        return True

    def _schedule_decodes(self, group: WorkerGroup, builder: PlanBuilder) -> list[RunningSequence]:
        """Schedules one token of each decoding sequence, oldest first. Returns the sequences that are in prefill.

        Sequences of the decode batch are in the plan once `advance_all` is called.
        """
        batch, turns = group.decode_batch, group.turns
        fits = len(group.running) <= builder.token_budget
        if not fits:
            batch.clear()  # then the oldest sequences run
        elif batch.num_sequences:
            self._extend_decode_batch(group, builder)
        unfinished: list[RunningSequence] = []
        for running in batch.outside.copy():
            if running.sequence.phase is not Phase.RUNNING:
                continue  # preempted for an older one in this loop
            num_scheduled = running.num_scheduled_tokens
            if num_scheduled < running.prefill_end:
                if num_scheduled < running.table.capacity or self._append_block(group, builder, running):
                    unfinished.append(running)
            elif num_scheduled < running.max_scheduled_tokens and builder.token_budget:
                if turns is not None and not turns.may_decode(running):
                    continue
                if num_scheduled == running.table.capacity and not self._append_block(group, builder, running):
                    continue
                if fits and running.has_sampled and batch.accepts(running):
                    batch.join(running, builder.record.number)
                else:
                    builder.schedule_decode(running)
        builder.reserve(batch.num_sequences)
        return unfinished

    def _extend_decode_batch(self, group: WorkerGroup, builder: PlanBuilder) -> None:
        """Allocates blocks to sequences of the decode batch that need one.

        If there may be too few free blocks, these sequences leave the decode batch, so that all get blocks in order.
        """
        batch, kv_cache = group.decode_batch, group.kv_cache
        num_due = batch.num_due
        if not num_due:
            return
        is_scarce = kv_cache.blocks.num_free < num_due + len(batch.outside)
        at_end = batch.take_due(leave=is_scarce or kv_cache.window is not None)
        builder.record.filled.extend(at_end)
        full = [r for r in at_end if batch.has(r) and r.num_scheduled_tokens == r.table.capacity]
        for running, block in zip(full, kv_cache.append_block_to_each(full), strict=True):
            builder.blocks.append(SlotBlocks(running.slot, [block]))

    def _append_block(self, group: WorkerGroup, builder: PlanBuilder, running: RunningSequence) -> bool:
        """Allocates a block. If none is free, younger sequences are preempted until enough will be free.

        Their blocks are free only after the plans in flight: False means that the sequence is not in this plan.
        """
        kv_cache, pool = group.kv_cache, group.kv_cache.blocks
        block = kv_cache.append_block(running)
        if block is None:
            num_owed = builder.num_blocks_owed + 1
            while pool.num_free + pool.num_pending < num_owed and group.running[-1] is not running:
                self._lifecycle.preempt(group, group.running[-1])
            block = kv_cache.append_block(running)
            if block is None:
                builder.owe_block()
                return False
        builder.blocks.append(SlotBlocks(running.slot, [block]))
        return True

    def _send(self, group: WorkerGroup, builder: PlanBuilder) -> StepPlan:
        ends = group.on_sent(builder.record)
        if builder.new_hashes or builder.copies:
            group.kv_cache.on_plan_sent(builder.new_hashes, [copy.src for copy in builder.copies])
        for request in builder.written_prompts:
            self._parallel_sampling.on_prompt_scheduled(request)
        full_blocks, saves, fetches = group.kv_cache.take_plan_changes()
        changes = (
            builder.starts,
            builder.blocks,
            builder.runs,
            full_blocks,
            saves,
            fetches,
            builder.copies,
            builder.sends,
            group.adapters.take_placed() if group.adapters.placed else [],
        )
        return StepPlan(self._scheduler, builder.record.number, ends, *changes)
