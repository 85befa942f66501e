"""Fills the token budget that decodes leave in a step: first unfinished prompts, then sequences from the queue."""

from dataclasses import dataclass

from blockyard.services.scheduler.admission.request_handler import Acceptance
from blockyard.services.scheduler.batch.pipeline_turns import even_chunk, tokens_of_cost
from blockyard.services.scheduler.batch.plan_builder import PlanBuilder
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixMatch
from blockyard.services.scheduler.lifecycle.lifecycle import Lifecycle
from blockyard.services.scheduler.lifecycle.parallel_sampling import ParallelSampling
from blockyard.services.scheduler.planning.fair_step_limiter import FairStepLimiter
from blockyard.services.scheduler.planning.partial_prefill_limits import LongPrefills, PartialPrefills
from blockyard.services.scheduler.planning.prefill_delay import PrefillDelay
from blockyard.services.scheduler.queue.adapter_waits import AdapterWaits, first_lacking
from blockyard.services.scheduler.queue.policy import BATCH_CLASS
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import QueueAmount, RunningSequence, Sequence
from blockyard.services.scheduler.transfers.handovers import Handovers
from blockyard.services.scheduler.workers.controls import Controls
from blockyard.services.scheduler.workers.crash_quarantine import CrashQuarantine
from blockyard.services.scheduler.workers.router import Router
from blockyard.shared.messages import FinishReason, SlotBlocks, SlotStart

NO_CLASS = 1 << 62  # above every class


@dataclass(frozen=True, slots=True)
class PrefillLimits:
    """What limits prefills besides slots, blocks and the token budget. None: it is off."""

    delay: PrefillDelay | None
    fair: FairStepLimiter
    partial: PartialPrefills | None
    whole_prompts: bool  # no chunked prefill: a prompt waits for a step that takes all of it
    reserve_whole_prompts: bool = True  # a prompt starts with blocks for all of its tokens, else for its first chunk


class PrefillPlanner:
    """Starts waiting sequences, and preempts running ones of higher classes for them."""

    def __init__(
        self,
        lifecycle: Lifecycle,
        waiting: WaitingQueue,
        parallel_sampling: ParallelSampling,
        handovers: Handovers,
        acceptance: Acceptance,
        router: Router,
        quarantine: CrashQuarantine,
        controls: Controls,
        adapter_waits: AdapterWaits,
        limits: PrefillLimits,
    ) -> None:
        self.num_displaced = 0  # sequences preempted for a waiting one
        self._lifecycle, self._waiting, self._policy = lifecycle, waiting, waiting.policy
        self._parallel_sampling, self._handovers, self._acceptance = parallel_sampling, handovers, acceptance
        self._router, self._quarantine, self._controls = router, quarantine, controls
        self._adapter_waits = adapter_waits
        self._delay, self._fair, self._partial = limits.delay, limits.fair, limits.partial
        self._whole_prompts = limits.whole_prompts
        self._reserve_whole_prompts = limits.reserve_whole_prompts or limits.whole_prompts

    def next(self, group: WorkerGroup, now: float) -> Sequence | None:
        """The next waiting sequence of a group; None if no sequence may start in it now."""
        if self._controls.paused:
            return None
        suspects = self._quarantine if self._quarantine.probations else None
        sequence = suspects.next_for(group) if suspects is not None else None
        if sequence is None:
            sequence = self._router.next(group) if self._router.is_needed else self._waiting.peek()
        if sequence is None or sequence.awaits_results() or not self._acceptance.can_accept(sequence.request):
            return None
        if suspects is not None and not suspects.may_run(group, sequence.request, now):
            return None
        return sequence if self._delay is None or self._delay.is_over(sequence.request, group, now) else None

    def preempt_for(self, group: WorkerGroup, sequence: Sequence) -> None:
        """Preempts sequences of higher classes if that makes room for `sequence`, the next waiting one.

        Their blocks may stay in use for some plans; the sequence starts after that. If preempting all of them would not
        make room, none is preempted.
        """
        running, rank = group.running, self._policy.key(sequence)[0]
        if not group.holds(sequence.request):
            return  # it is passed over
        if not running or not self._policy.preemptible_by(running[-1].sequence, rank):
            return
        found = group.kv_cache.find(sequence)
        victims = [other for other in running if self._policy.preemptible_by(other.sequence, rank)]
        num_blocks = sum(len(victim.table.blocks) - victim.table.num_freed for victim in victims)
        if _num_lacking(group, sequence, found) > num_blocks:
            return
        self._router.reserve(group, sequence)
        while victims and (len(running) >= group.max_num_seqs or _num_lacking(group, sequence, found) > 0):
            self.num_displaced += 1
            self._lifecycle.preempt(group, victims.pop())

    def preempt_batch_lines(self, group: WorkerGroup) -> None:
        """Preempts batch lines for the online sequences that the next plan can start, not only for the first of them.

        With several groups it is not known which of them start here.
        """
        running, waits = group.running, self._waiting.usage.amount
        if self._router.is_needed or not running or not running[-1].sequence.request.is_batch_line:
            return
        num_starts = min(waits.sequences, 1 + group.max_num_batched_tokens * waits.sequences // max(1, waits.tokens))
        while (
            running
            and running[-1].sequence.request.is_batch_line
            and group.max_num_seqs - len(running) < min(num_starts, group.max_num_seqs)
        ):
            self.num_displaced += 1
            self._lifecycle.preempt(group, running[-1])

    def schedule_first(self, group: WorkerGroup, builder: PlanBuilder, sequence: Sequence) -> bool:
        """Schedules waiting sequences up to the class of `sequence`, no unfinished prompts. False if none fits.

        Where all that has a higher class are batch lines, every online sequence may start: a policy may give each of
        them another class.
        """
        rank = self._policy.key(sequence)[0]
        online = next((one.sequence for one in reversed(group.running) if not one.sequence.request.is_batch_line), None)
        only_lines = online is None or not self._policy.preemptible_by(online, rank)
        self.schedule(group, builder, [], BATCH_CLASS if only_lines and rank < BATCH_CLASS else rank + 1)
        if not builder.starts:
            return False
        group.last_fair_plan = builder.record.number
        return True

    def schedule(
        self, group: WorkerGroup, builder: PlanBuilder, unfinished: list[RunningSequence], below: int = NO_CLASS
    ) -> None:
        """Schedules unfinished prompts, then waiting sequences; lower classes first, long prompts last.

        Only waiting sequences of classes lower than `below` start.
        """
        longs: LongPrefills | None = None
        if self._partial is not None:
            longs, unfinished = self._partial.begin_plan(group, builder.token_budget, unfinished)
        for running in unfinished:
            self._start_waiting(group, builder, longs, running.key[0])
            if (most := self._max_tokens(group, builder, longs, running.sequence)) > 0:
                self._schedule_chunk(group, builder, running, most)
        self._start_waiting(group, builder, longs, below)
        if longs is None:
            return
        for running, num_tokens in longs.split_tokens(builder.token_budget):
            if (most := self._max_tokens(group, builder, None, running.sequence)) > 0:
                self._schedule_chunk(group, builder, running, min(num_tokens, most))

    def _max_tokens(
        self, group: WorkerGroup, builder: PlanBuilder, longs: LongPrefills | None, sequence: Sequence
    ) -> int:
        """Tokens that this plan may compute of a prompt; 0 or less: none."""
        left = builder.token_budget - (longs.reserved_tokens if longs is not None else 0)
        if self._whole_prompts or not self._policy.has_classes:
            return left
        used = sum(builder.record.chunk_sizes.values())
        return min(left, self._fair.max_prefill_tokens(group, sequence) - used)

    def _schedule_chunk(self, group: WorkerGroup, builder: PlanBuilder, running: RunningSequence, most: int) -> None:
        """Schedules the next tokens of a prompt, as far as there are free blocks for them."""
        kv_cache, scheduled = group.kv_cache, running.num_scheduled_tokens
        num_tokens, balanced = min(running.prefill_end - scheduled, most), group.geometry.balanced_context
        if balanced and not self._whole_prompts:
            num_tokens = min(num_tokens, even_chunk(most, scheduled, balanced))
        if scheduled + num_tokens > running.table.capacity:
            blocks = kv_cache.extend(running, scheduled + num_tokens)
            if blocks:
                builder.blocks.append(SlotBlocks(running.slot, blocks))
            num_tokens = min(num_tokens, running.table.capacity - scheduled)
        builder.schedule(running, num_tokens)
        if balanced:
            builder.reserve(min(tokens_of_cost(num_tokens, scheduled, balanced) - num_tokens, builder.token_budget))
        for block_hash, block in kv_cache.blocks_filled_by_plan(running).items():
            builder.new_hashes.setdefault(block_hash, block)
        if running.sequence.handover is not None:
            builder.sends += self._handovers.send(group, running, builder.now)
        request = running.sequence.request
        is_written = scheduled + num_tokens == running.prefill_end and not running.leaves_prefilled
        if is_written and len(request.active_sequences) > 1:
            builder.written_prompts.append(request)

    def _start_waiting(self, group: WorkerGroup, builder: PlanBuilder, longs: LongPrefills | None, below: int) -> None:
        """Starts waiting sequences in order until one does not fit. Only long prompts may be passed by others."""
        kv_cache = group.kv_cache
        while self._has_room(builder, longs) and self._waiting.num_sequences:
            sequence = self.next(group, builder.now)
            if sequence is None or self._policy.key(sequence)[0] >= below:
                return
            most = self._max_tokens(group, builder, longs, sequence)
            if self.end_unscheduled(group, sequence) or self._waits_for_adapter(group, sequence):
                continue
            is_line = sequence.request.is_batch_line
            if most <= 0 or not (group.can_schedule_batch_line if is_line else group.can_schedule):
                return
            found = self._find_prefix(group, builder, sequence)
            if found is None:
                self._lifecycle.drop_handover(sequence)
                continue
            if found.next_hash in builder.new_hashes:
                return  # this plan computes blocks that the sequence can find in the next one
            num_tokens = sequence.num_tokens - found.num_tokens
            is_long = self._partial is not None and self._partial.is_long(group, num_tokens)
            if self._partial is not None and longs is not None and is_long and not longs.can_add():
                self._partial.defer(sequence)
                self._lifecycle.drop_handover(sequence)  # others may take the room that it reserved
                continue
            alone = not group.running
            num_reserved = sequence.num_tokens
            if not self._reserve_whole_prompts and sequence.handover is None:
                num_reserved = min(num_reserved, found.num_tokens + most)
            num_blocks = kv_cache.num_blocks_to_take(num_reserved, found, alone)
            if not kv_cache.blocks.admits(num_blocks, found.blocks, alone):
                return
            if num_tokens > most and not self._may_split(group, longs, num_tokens, most):
                return
            running = self.start(group, builder, sequence, found, num_blocks)
            if longs is not None and is_long:
                longs.add(running)
            else:
                self._schedule_chunk(group, builder, running, most)

    def _waits_for_adapter(self, group: WorkerGroup, sequence: Sequence) -> bool:
        """Sets a sequence aside until its adapters may start."""
        if not (adapters := sequence.request.adapters):
            return False
        lacking = first_lacking(adapters, [group])
        if lacking is None:
            return False
        self._adapter_waits.defer(sequence, lacking)
        self._lifecycle.drop_handover(sequence)
        return True

    def _find_prefix(self, group: WorkerGroup, builder: PlanBuilder, sequence: Sequence) -> PrefixMatch | None:
        """The blocks to start with; None if the sequence is parked for a sibling's prompt."""
        found = group.kv_cache.find(sequence)
        if not sequence.has_siblings:
            return found
        return self._parallel_sampling.find_prefix(group, builder.record, sequence, found)

    def _has_room(self, builder: PlanBuilder, longs: LongPrefills | None) -> bool:
        reserved = longs.reserved_tokens if longs is not None else 0
        return builder.token_budget > reserved and not builder.num_blocks_owed

    def _may_split(self, group: WorkerGroup, longs: LongPrefills | None, num_tokens: int, most: int) -> bool:
        """Whether this plan may compute `most` tokens of a prompt that lacks `num_tokens`."""
        if self._whole_prompts and min(num_tokens, group.max_num_batched_tokens) > most:
            return False  # a later step takes all of it
        return longs is None or longs.may_split()

    def start(
        self, group: WorkerGroup, builder: PlanBuilder, sequence: Sequence, found: PrefixMatch, num_blocks: int
    ) -> RunningSequence:
        """Moves a sequence from the queue to the running batch. The caller has checked for free slots and blocks."""
        self._waiting.dequeue(sequence)
        self._acceptance.accept(sequence.request)
        is_first = sequence.num_cached_tokens is None
        sequence.set_key(self._policy.key(sequence), builder.now)
        self._policy.on_scheduled(sequence, sequence.num_tokens - found.num_tokens if is_first else 0)
        if found.copy_from is not None:
            found.copy_from = builder.source_of(found.copy_from)
        running = group.schedule(sequence, num_blocks, found)
        if sequence.handover is not None:
            self._handovers.begin(group, running, builder.now)
        if found.copy_from is not None:
            builder.copy(found.copy_from, running.table.blocks[running.table.num_cached])
        for adapter in sequence.request.adapters:
            self._adapter_waits.on_started(adapter)
        builder.starts.append(slot_start(group, running))
        return running

    def may_share_step(self, first: Sequence, other: Sequence) -> bool:
        """Whether texts of both may be in one packed step: one that may have broken a worker runs alone."""
        suspects = self._quarantine.probations
        return first is other or not suspects or not {first.request.id, other.request.id} & suspects.keys()

    def start_texts(self, sequence: Sequence, amount: QueueAmount, now: float) -> None:
        """Some texts of a sequence are in a packed step, or all that waited."""
        self._acceptance.accept(sequence.request)
        sequence.set_key(self._policy.key(sequence), now)
        self._waiting.take_texts(sequence, amount)
        self._policy.on_scheduled(sequence, amount.tokens)

    def end_unscheduled(self, group: WorkerGroup, sequence: Sequence) -> bool:
        """Ends a waiting sequence that has all its tokens or can never run in this group."""
        request, max_len = sequence.request, group.max_model_len
        max_tokens = request.frame.sampling.max_tokens
        if sequence.outputs and sequence.num_tokens >= min(request.num_prompt + max_tokens, max_len):
            self._acceptance.accept(request)
            if sequence.hypothesis is None:
                self._lifecycle.finish(sequence, FinishReason.LENGTH)
            else:
                self._lifecycle.fail(sequence, f"the worker that is left takes {max_len} tokens")
        elif request.num_prompt + min(1, max_tokens) > max_len:
            self._acceptance.accept(request)
            self._lifecycle.fail(
                sequence, f"the prompt has {request.num_prompt} tokens, the worker that is left takes {max_len}"
            )
        else:
            return False
        return True


def _num_lacking(group: WorkerGroup, sequence: Sequence, found: PrefixMatch) -> int:
    """Blocks that a waiting sequence would lack even if all plans in flight were completed."""
    return group.kv_cache.num_blocks_lacking(sequence.num_tokens, found, alone=not group.running)


def slot_start(group: WorkerGroup, running: RunningSequence) -> SlotStart:
    """The worker's copy of a sequence, before this plan schedules any of its tokens."""
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
        has_text=request.has_text,
        pooled=request.pooled,
        adapter_place=running.adapter_place,
        prompt_adapter=request.prompt_adapter,
        num_virtual_tokens=request.num_virtual,
        num_added_tokens=request.num_added,
    )
