"""Choices of one request compute their prompt once.

The first of them, the leader, goes ahead; the others are parked until a plan that writes the last of its prompt has
been sent. Plans run in order, so that a later one may read it: each of the others shares the full blocks by count, its
worker copies the block that the prompt ends in, and it computes the prompt's last token itself, because it draws its
own token from there.
"""

from collections.abc import Iterable

from blockyard.services.scheduler.batch.plan_builder import PlanRecord
from blockyard.services.scheduler.kv_cache.prefix_cache import PrefixMatch
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Phase, Request, RunningSequence, Sequence
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup


class ParallelSampling:
    """Holds back the choices that are better started later; says what those that start can begin with."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self.num_awaiting_prompt = 0
        self._waiting = waiting

    def add(self, request: Request, sequences: Iterable[Sequence]) -> None:
        """These wait from now on, each in the queue or parked."""
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
        """The plan that writes the last of one choice's prompt has been sent: the others may begin."""
        awaiting_prompt = request.take_awaiting_prompt()
        self.num_awaiting_prompt -= len(awaiting_prompt)
        for sequence in awaiting_prompt:
            self._waiting.unpark(sequence)
            self._waiting.push(sequence)

    def on_removed(self, sequence: Sequence) -> None:
        """A choice has ended. If it was the leader, in the middle of its prompt, the next one takes over."""
        request = sequence.request
        if not request.awaiting_prompt:
            return
        if sequence in request.awaiting_prompt:
            request.awaiting_prompt.remove(sequence)
            self._waiting.unpark(sequence)
            self.num_awaiting_prompt -= 1
        elif not any(_computes_prompt(other) for other in request.active_sequences):
            leader = request.awaiting_prompt.pop(0)
            self._waiting.unpark(leader)
            self._waiting.push(leader)
            self.num_awaiting_prompt -= 1

    def find_prefix(
        self, group: WorkerGroup, record: PlanRecord, sequence: Sequence, found: PrefixMatch
    ) -> PrefixMatch | None:
        """What a choice may begin with in this plan; None if it has been parked: a sibling is at its prompt.

        `found` is what there is of it without siblings.
        """
        request = sequence.request
        if sequence.prompt_source is not None and _has(sequence.prompt_source, group, record, sequence.num_tokens - 1):
            return self._fork(group, sequence, sequence.prompt_source, sequence.num_tokens - 1)
        num_tokens = min(request.num_prompt, sequence.num_tokens - 1)
        if len(request.active_sequences) < 2 or num_tokens <= found.num_tokens:
            return found
        is_near = False
        scored = request.frame.sampling.num_prompt_logprobs is not None
        for other in request.active_sequences:
            running = other.last_run
            if running is None or not _runs(running, group):
                continue
            if running.table.num_freed > group.kv_cache.window.num_skipped_blocks(num_tokens):
                continue  # it has given up what this one would have to see
            if scored and (running.table.num_cached or running.table.copied_from is not None):
                continue  # a fork itself: nobody may be left who has the log-probabilities of the prompt
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
        first = group.kv_cache.window.num_skipped_blocks(num_tokens)
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
    """Whether a seat's KV is written that far when this plan begins, and it still holds what is seen from there.

    The seat may be new in this plan: then the block that it ends in is filled by a copy of this plan, and a reader
    copies that one's source (see `PlanBuilder.source_of`).
    """
    if not _runs(running, group) or running.table.num_freed > group.kv_cache.window.num_skipped_blocks(num_tokens):
        return False
    return running.num_scheduled_tokens - record.num_scheduled(running) >= num_tokens


def _computes_prompt(sequence: Sequence) -> bool:
    """It will write the prompt, and a plan that does has not been sent."""
    if sequence.phase is Phase.RUNNING:
        return sequence.last_run is not None and sequence.last_run.num_scheduled_tokens < sequence.last_run.prefill_end
    return bool(sequence.ticket)
