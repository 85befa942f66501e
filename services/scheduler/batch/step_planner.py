"""One plan: decodes first, then prefills with what is left of the budget, then newcomers."""

from blockyard.services.scheduler.batch.admission_delay import AdmissionDelay
from blockyard.services.scheduler.batch.decode_planner import DecodePlanner
from blockyard.services.scheduler.batch.fair_step_limiter import FairStepLimiter
from blockyard.services.scheduler.batch.partial_prefill_limits import (
    DeferredPrompts,
    LongPrefills,
    PartialPrefillLimits,
)
from blockyard.services.scheduler.batch.plan_builder import PlanBuilder
from blockyard.services.scheduler.batch.preemption import Preemption
from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixMatch
from blockyard.services.scheduler.lifecycle import Lifecycle
from blockyard.services.scheduler.queue.acceptance import Acceptance
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.beam_sequences import BeamScheduler
from blockyard.services.scheduler.sequences.requests import RunningSequence, Sequence
from blockyard.services.scheduler.workers.router import Router
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup
from blockyard.shared.messages import FinishReason, SlotBlocks, SlotStart, StepPlan

NO_CLASS = 1 << 62  # is above every class


class StepPlanner:
    def __init__(
        self,
        scheduler: int,
        waiting: WaitingQueue,
        lifecycle: Lifecycle,
        acceptance: Acceptance,
        router: Router,
        beam_scheduler: BeamScheduler,
        admission_delay: AdmissionDelay,
        limits: PartialPrefillLimits,
    ) -> None:
        self.preemption = Preemption(waiting, router, lifecycle)
        self._scheduler, self._waiting, self._lifecycle = scheduler, waiting, lifecycle
        self._policy, self._router, self._acceptance, self._parallel_sampling = (
            waiting.policy,
            router,
            acceptance,
            beam_scheduler.parallel_sampling,
        )
        self._beam_scheduler, self._admission_delay, self._limits = beam_scheduler, admission_delay, limits
        self._deferred, self._fair_limiter = DeferredPrompts(waiting), FairStepLimiter(waiting.policy)
        self._decode_planner = DecodePlanner(lifecycle)

    def plan(self, group: WorkerGroup) -> StepPlan | None:
        """The next plan of a group, or None if nothing can run in it now."""
        if self._admission_delay.frozen:
            return None
        group.kv_cache.hash_full_blocks()
        if (sequence := self._next(group)) is not None:
            self.preemption.preempt_for(group, sequence)
        builder = PlanBuilder(group.plan_clock.last_sent + 1, group.max_num_batched_tokens)
        restarts = [(running, _slot_start(group, running)) for running in group.restarts]
        decodes = self._divide_step(group, builder, sequence)
        relieved = self._beam_scheduler.preempt_stalled(group)
        if decodes:
            self._decode_planner.add_decode_batch(group, builder)
        if not builder.runs:
            return self.plan(group) if relieved else None
        self._restart(group, builder, restarts)
        ends, group.slots_to_end = group.slots_to_end, []
        builder.record.runs = builder.runs
        group.on_sent(builder.record)
        group.kv_cache.on_plan_sent(builder.new_hashes, [copy.src for copy in builder.copies])
        for request in builder.written_prompts:
            self._parallel_sampling.on_prompt_scheduled(request)
        changes = (builder.starts, builder.blocks, builder.runs, *group.kv_cache.take_plan_changes(), builder.copies)
        return StepPlan(self._scheduler, builder.record.number, ends, *changes)

    def _divide_step(self, group: WorkerGroup, builder: PlanBuilder, sequence: Sequence | None) -> bool:
        """Decodes first, but perhaps none if `sequence`, which is next, goes before others; then no other prompts.

        Returns whether there are decodes.
        """
        excludes_other_prefills = sequence is not None and self._fair_limiter.excludes_other_prefills(group, sequence)
        excludes_decodes = excludes_other_prefills and self._fair_limiter.excludes_decodes(group)
        sequences = [] if excludes_decodes else self._decode_planner.schedule(group, builder)
        if sequence is not None and excludes_other_prefills:
            self._schedule_prefills(group, builder, [], self._policy.key(sequence)[0] + 1)
            if builder.starts:
                group.last_fair_plan = builder.record.number
                return not excludes_decodes
        self._schedule_prefills(
            group, builder, self._decode_planner.schedule(group, builder) if excludes_decodes else sequences
        )
        return True

    def _schedule_prefills(
        self, group: WorkerGroup, builder: PlanBuilder, sequences: list[RunningSequence], below: int = NO_CLASS
    ) -> None:
        """What decodes left goes to prompts under way, then to newcomers; lower classes first, long ones last."""
        longs = LongPrefills(self._limits, builder.token_budget)
        shorts: list[RunningSequence] = []
        for running in sequences:
            if self._limits.is_long(group, running.prefill_end - running.num_scheduled_tokens):
                longs.add(running)
            else:
                shorts.append(running)
        for running in shorts:
            self._schedule_waiting(group, builder, longs, running.key[0])
            if (room := self._max_tokens_for(group, builder, longs, running.sequence)) > 0:
                self._schedule_prefill(group, builder, running, room)
        self._schedule_waiting(group, builder, longs, below)
        for running, num_tokens in longs.split_tokens(builder.token_budget):
            if (room := self._max_tokens_for(group, builder, None, running.sequence)) > 0:
                self._schedule_prefill(group, builder, running, min(num_tokens, room))

    def _max_tokens_for(
        self, group: WorkerGroup, builder: PlanBuilder, longs: LongPrefills | None, sequence: Sequence
    ) -> int:
        """Tokens of the step for this one's prompt; 0 or less: none."""
        room = builder.token_budget - (longs.reserved_tokens if longs is not None else 0)
        if self._limits.whole_prompts:
            return room
        return min(
            room, self._fair_limiter.max_prefill_tokens(group, sequence) - sum(builder.record.chunk_sizes.values())
        )

    def _schedule_prefill(self, group: WorkerGroup, builder: PlanBuilder, running: RunningSequence, most: int) -> None:
        num_tokens = min(running.prefill_end - running.num_scheduled_tokens, most)
        if running.num_scheduled_tokens + num_tokens > running.table.capacity:
            num_tokens = self._extend_prefill(group, builder, running, num_tokens)
        builder.schedule(running, num_tokens)
        for name, block in group.kv_cache.blocks_filled_by_plan(running).items():
            builder.new_hashes.setdefault(name, block)
        if running.num_scheduled_tokens == running.prefill_end and len(running.sequence.request.active_sequences) > 1:
            builder.written_prompts.append(running.sequence.request)

    def _extend_prefill(
        self, group: WorkerGroup, builder: PlanBuilder, running: RunningSequence, num_tokens: int
    ) -> int:
        """Blocks for so many more tokens of a prompt, or for as many as there are free blocks. Returns the tokens."""
        taken = group.kv_cache.extend(running, running.num_scheduled_tokens + num_tokens)
        if taken:
            builder.blocks.append(SlotBlocks(running.slot, taken))
        return min(num_tokens, running.table.capacity - running.num_scheduled_tokens)

    def _next(self, group: WorkerGroup) -> Sequence | None:
        """Who is to be seated next, if anybody may be now."""
        sequence = self._admission_delay.next_probation(group) or self._router.next(group)
        if sequence is None or sequence.awaits_results() or not self._acceptance.can_accept(sequence.request):
            return None
        return sequence if self._admission_delay.may_admit(sequence.request, group) else None

    def _schedule_waiting(self, group: WorkerGroup, builder: PlanBuilder, longs: LongPrefills, below: int) -> None:
        """Seats those of lower classes, in order, and never past one who does not fit yet, unless it is long."""
        if longs.can_add():
            self._deferred.release()
        while builder.token_budget > longs.reserved_tokens and not builder.num_blocks_owed:
            sequence = self._next(group)
            if sequence is None or self._policy.key(sequence)[0] >= below:
                return
            token_budget = self._max_tokens_for(group, builder, longs, sequence)
            if self._ended_unscheduled(group, sequence):
                continue
            if token_budget <= 0 or not group.can_schedule:
                return
            found = self._parallel_sampling.find_prefix(group, builder.record, sequence, group.kv_cache.find(sequence))
            if found is None:
                continue
            if found.next_hash in builder.new_hashes:
                return  # this plan computes what the next one will find
            num_tokens = sequence.num_tokens - found.num_tokens
            is_long = self._limits.is_long(group, num_tokens)
            if is_long and not longs.can_add():
                self._deferred.defer(sequence)
                continue
            num_blocks = group.kv_cache.num_blocks_to_take(sequence.num_tokens, found, alone=not group.running)
            if not group.kv_cache.blocks.admits(num_blocks, found.blocks, alone=not group.running):
                return
            if num_tokens > token_budget and not longs.may_split(
                min(num_tokens, group.max_num_batched_tokens) > token_budget
            ):
                return
            running = self._schedule_sequence(group, builder, sequence, found, num_blocks)
            builder.starts.append(_slot_start(group, running))
            if is_long:
                longs.add(running)
            else:
                self._schedule_prefill(group, builder, running, token_budget)

    def _schedule_sequence(
        self, group: WorkerGroup, builder: PlanBuilder, sequence: Sequence, found: PrefixMatch, num_blocks: int
    ) -> RunningSequence:
        """The caller has looked at free slots and blocks."""
        self._acceptance.accept(sequence.request)
        self._waiting.dequeue(sequence)
        self._admission_delay.on_scheduled(sequence)
        sequence.key = self._policy.key(sequence)
        self._policy.on_scheduled(
            sequence, sequence.num_tokens - found.num_tokens if sequence.num_cached_tokens is None else 0
        )
        if found.copy_from is not None:
            found.copy_from = builder.source_of(found.copy_from)
        running = group.schedule(sequence, num_blocks, found)
        if found.copy_from is not None:
            builder.copy(found.copy_from, running.table.blocks[running.table.num_cached])
        return running

    def _ended_unscheduled(self, group: WorkerGroup, sequence: Sequence) -> bool:
        """Ends a choice that has all its tokens or can never run here."""
        sampling = sequence.request.frame.sampling
        num_prompt = sequence.request.num_prompt
        if sequence.outputs and sequence.num_tokens >= min(num_prompt + sampling.max_tokens, group.max_model_len):
            self._acceptance.accept(sequence.request)
            if sequence.hypothesis is None:
                self._lifecycle.finish(sequence, FinishReason.LENGTH)
            else:
                self._lifecycle.fail(sequence, f"the worker that is left takes {group.max_model_len} tokens")
        elif num_prompt + min(1, sampling.max_tokens) > group.max_model_len:
            detail = f"the prompt has {num_prompt} tokens, the worker that is left takes {group.max_model_len}"
            self._acceptance.accept(sequence.request)
            self._lifecycle.fail(sequence, detail)
        else:
            return False
        return True

    def _restart(
        self, group: WorkerGroup, builder: PlanBuilder, restarts: list[tuple[RunningSequence, SlotStart]]
    ) -> None:
        """Seats that stay where they are and go on with another token than their worker has."""
        group.restarts.clear()
        for running, start in restarts:
            if running in group.running:  # not preempted since
                group.slots_to_end.append(running.slot)
                builder.starts.append(start)


def _slot_start(group: WorkerGroup, running: RunningSequence) -> SlotStart:
    """As of now: before this plan grants it anything."""
    sequence, request = running.sequence, running.sequence.request
    sampling = request.frame.sampling
    if request.search is not None:
        sampling = request.search.sampling(sampling, group.geometry.eos_token_ids)
    return SlotStart(
        running.slot,
        request.frame.prompt_ids + sequence.outputs.tobytes(),
        request.num_prompt,
        num_computed=running.num_scheduled_tokens,
        blocks=list(running.table.blocks),
        sampling=sampling,
        choice=sequence.index,
        prompt_logprobs_from=sequence.prompt_next,
    )
