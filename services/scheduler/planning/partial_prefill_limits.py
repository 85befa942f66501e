"""Divides the prefill tokens of a step between prompts, so that a long prompt does not delay short ones.

With one partial prefill at a time (the default) prompts are computed in order, the last prompt of a step continues in
the next, and there is no `PartialPrefills`. With more, long prompts are scheduled last in each plan: some tokens are
reserved for them, and they also take what short prompts do not need.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import RunningSequence, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPrefillLimits:
    max_partial: int = 1  # prompts that may be unfinished at a time
    max_long: int = 1  # long prompts that may be unfinished at a time
    long_tokens: int = 0  # a prompt with more is long; 0: 4 % of the model's length
    whole_prompts: bool = False  # no chunked prefill: a prompt waits for a step that takes all of it

    def is_long(self, group: WorkerGroup, num_tokens: int) -> bool:
        """Whether a prompt with `num_tokens` left to compute is long."""
        return num_tokens > (self.long_tokens or group.max_model_len // 25)


class LongPrefills:
    """The long prompts of one plan."""

    def __init__(self, limits: PartialPrefillLimits, token_budget: int) -> None:
        self._sequences: list[RunningSequence] = []
        self._limits = limits
        self._tokens_each = max(1, token_budget // limits.max_partial)

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the step that only long prompts may use."""
        return len(self._sequences) * self._tokens_each

    def add(self, running: RunningSequence) -> None:
        self._sequences.append(running)

    def can_add(self) -> bool:
        return len(self._sequences) < self._limits.max_long

    def may_split(self) -> bool:
        """Whether another prompt may be split."""
        return len(self._sequences) < self._limits.max_partial

    def split_tokens(self, token_budget: int) -> Iterator[tuple[RunningSequence, int]]:
        """Divides the tokens that are left in the step between the long prompts."""
        for i, running in enumerate(self._sequences):
            num_tokens = min(
                running.prefill_end - running.num_scheduled_tokens, token_budget // (len(self._sequences) - i)
            )
            if num_tokens:
                token_budget -= num_tokens
                yield running, num_tokens


class PartialPrefills:
    """Says which prompts are long, and keeps some waiting for another long one: shorter ones start before them."""

    def __init__(self, limits: PartialPrefillLimits, waiting: WaitingQueue) -> None:
        self._limits, self._waiting = limits, waiting
        self.is_long = limits.is_long
        self._deferred: list[tuple[int, Sequence]] = []  # with its ticket: if the sequence has another one, it has left

    def begin_plan(
        self, group: WorkerGroup, token_budget: int, unfinished: list[RunningSequence]
    ) -> tuple[LongPrefills, list[RunningSequence]]:
        """Returns the long ones of the unfinished prompts, and the others."""
        longs, others = LongPrefills(self._limits, token_budget), list[RunningSequence]()
        for running in unfinished:
            if self.is_long(group, running.prefill_end - running.num_scheduled_tokens):
                longs.add(running)
            else:
                others.append(running)
        if longs.can_add():
            self._release()
        return longs, others

    def defer(self, sequence: Sequence) -> None:
        if sequence.is_set_aside:  # in a group's queue
            self._waiting.requeue(sequence)
        self._waiting.set_aside(sequence)
        self._deferred.append((sequence.ticket, sequence))

    def _release(self) -> None:
        """Puts all back into the order of the queue."""
        sequences, self._deferred = self.deferred(), []
        for sequence in sequences:
            self._waiting.requeue(sequence)

    def deferred(self) -> list[Sequence]:
        return [sequence for ticket, sequence in self._deferred if sequence.ticket == ticket]
