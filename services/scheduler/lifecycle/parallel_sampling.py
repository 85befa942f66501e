"""Sequences of one request compute their prompt once.

The first sequence computes the prompt. The others wait until a plan that computes the last prompt token has been sent;
plans run in order, so that a later plan may read its blocks. Each of the others shares the full blocks, copies the
block that the prompt ends in, and computes the last prompt token itself, because it samples its own token there.
If the first sequence is handed over to another group, the others wait until it runs there.
"""

from collections.abc import Iterable

from blockyard.services.scheduler.batch.plan_builder import PlanRecord
from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixMatch
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Phase, Request, RunningSequence, Sequence


class ParallelSampling:
    """Parks sequences until a sibling has computed their prompt, and finds the blocks to share."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.num_awaiting_prompt = 0
        self._waiting = waiting

    def add(self, request: Request, sequences: Iterable[Sequence]) -> None:
        """Queues sequences, or parks them until their prompt is computed."""
        for sequence in sequences:
            if (
                sequence.prompt_source is None
                and request.num_prompt > 1
                and any(_computes_prompt(other) for other in request.active_sequences)
            ):
                self._park(sequence)
            else:
                self._waiting.push(sequence)

    def on_prompt_scheduled(self, request: Request) -> None:
        """A plan that computes the last prompt token has been sent: the other sequences may start."""
        awaiting_prompt = request.take_awaiting_prompt()
        self.num_awaiting_prompt -= len(awaiting_prompt)
        for sequence in awaiting_prompt:
            self._waiting.unpark(sequence)
            self._waiting.push(sequence)

    def take_next(self, request: Request) -> Sequence | None:
        """A sequence that waits for the prompt, and no longer does."""
        if not request.awaiting_prompt:
            return None
        sequence = request.awaiting_prompt.pop(0)
        self._waiting.unpark(sequence)
        self.num_awaiting_prompt -= 1
        return sequence

    def on_removed(self, sequence: Sequence) -> None:
        """A sequence has ended. If it was computing the prompt, the next one computes it."""
        request = sequence.request
        if not request.awaiting_prompt:
            return
        if sequence in request.awaiting_prompt:
            request.awaiting_prompt.remove(sequence)
            self._waiting.unpark(sequence)
            self.num_awaiting_prompt -= 1
        elif not any(_computes_prompt(other) for other in request.active_sequences):
            leader = self.take_next(request)
            assert leader is not None
            self._waiting.push(leader)

    def find_prefix(
        self, group: WorkerGroup, record: PlanRecord, sequence: Sequence, found: PrefixMatch
    ) -> PrefixMatch | None:
        """The blocks to start with in this plan; None if the sequence is parked for a sibling's prompt.

        `found`: cached blocks, without siblings.
        """
        request = sequence.request
        if sequence.prompt_source is not None and _has(sequence.prompt_source, group, record, sequence.num_tokens - 1):
            return self._fork(group, sequence, sequence.prompt_source, sequence.num_tokens - 1)
        num_tokens = min(request.num_prompt, sequence.num_tokens - 1)
        if num_tokens <= found.num_tokens:
            return found
        is_near = False
        scored = request.frame.sampling.num_prompt_logprobs is not None
        if scored and request.attempt and not sequence.prompt_next:
            return found  # a stream was lost, and with it the log-probabilities that a sibling had computed
        for other in request.active_sequences:
            running = other.last_run
            if running is None or not _runs(running, group):
                continue
            if running.table.num_freed > group.kv_cache.num_skipped_blocks(num_tokens):
                continue  # its first blocks in the window are freed
            is_shared = running.table.num_cached > 0 or running.table.copied_from is not None
            if scored and is_shared and not other.was_prefilled:
                continue  # it shares a prompt itself and has no prompt log-probabilities
            if _has(running, group, record, num_tokens):
                return self._fork(group, sequence, running, num_tokens)
            is_near = True
        if not is_near or num_tokens - found.num_tokens < group.kv_cache.blocks.block_size:
            return found
        self._waiting.discard(sequence)
        self._park(sequence)
        return None

    def _park(self, sequence: Sequence) -> None:
        sequence.request.awaiting_prompt.append(sequence)
        self._waiting.park(sequence)
        self.num_awaiting_prompt += 1

    def _fork(self, group: WorkerGroup, sequence: Sequence, source: RunningSequence, num_tokens: int) -> PrefixMatch:
        num_full, rest = divmod(num_tokens, group.kv_cache.blocks.block_size)
        sequence.set_num_cached(source.sequence.num_cached_tokens)  # of the same prompt
        first = group.kv_cache.num_skipped_blocks(num_tokens)
        copied = source.table.blocks[num_full] if rest else None
        return PrefixMatch(
            source.table.blocks[first:num_full], num_tokens=num_tokens, copy_from=copied, num_skipped=first
        )


def _runs(running: RunningSequence, group: WorkerGroup) -> bool:
    return (
        running.worker == group.worker
        and running.sequence.last_run is running
        and running.sequence.phase is Phase.RUNNING
    )


def _has(running: RunningSequence, group: WorkerGroup, record: PlanRecord, num_tokens: int) -> bool:
    """Whether the first `num_tokens` tokens are computed before this plan, and their blocks in the window are held.

    If the sequence starts in this plan, a block of it may be filled by a copy; a reader copies the source of that copy
    (see `PlanBuilder.source_of`).
    """
    if not _runs(running, group) or running.table.num_freed > group.kv_cache.num_skipped_blocks(num_tokens):
        return False
    return running.num_scheduled_tokens - record.num_scheduled(running) >= num_tokens


def _computes_prompt(sequence: Sequence) -> bool:
    """Whether it is to compute the prompt, or takes it to another group, and no plan that does so has been sent."""
    running = sequence.last_run
    if sequence.phase is Phase.RUNNING and running is not None:
        return running.leaves_prefilled or running.num_scheduled_tokens < running.prefill_end
    return sequence.phase is Phase.ARRIVING or bool(sequence.ticket)
