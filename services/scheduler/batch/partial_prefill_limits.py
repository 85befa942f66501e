"""How prompts in the making divide what decodes leave of a step, so that a long one does not keep out the short ones.

With one partial prefill at a time (the default) prompts are computed in their order, and the one that comes to its
step's end goes on in the next. With more, long prompts come last in each plan: they leave room for others, and take
what these do not need.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import RunningSequence, Sequence
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPrefillLimits:
    max_partial: int = 1  # prompts that may be computed in parts at a time
    max_long: int = 1  # of those, long ones
    long_tokens: int = 0  # longer prompts are long; 0: 4 % of the model's length
    whole_prompts: bool = False  # no chunked prefill: a prompt waits for a step that takes all of it

    def is_long(self, group: WorkerGroup, num_tokens: int) -> bool:
        """So many tokens are to be computed of a prompt."""
        return self.max_partial > 1 and num_tokens > (self.long_tokens or group.max_model_len // 25)


class LongPrefills:
    """Those of one plan."""

    def __init__(self, limits: PartialPrefillLimits, token_budget: int) -> None:
        self._sequences: list[RunningSequence] = []
        self._limits = limits
        self._tokens_each = max(1, token_budget // limits.max_partial)

    @property
    def reserved_tokens(self) -> int:
        """Tokens of the step that others leave to them."""
        return len(self._sequences) * self._tokens_each

    def add(self, running: RunningSequence) -> None:
        self._sequences.append(running)

    def can_add(self) -> bool:
        return len(self._sequences) < self._limits.max_long

    def may_split(self, could_be_whole: bool) -> bool:
        """Whether another prompt may be computed in part; `could_be_whole`: another step would take all of it."""
        return len(self._sequences) < self._limits.max_partial and not (self._limits.whole_prompts and could_be_whole)

    def split_tokens(self, token_budget: int) -> Iterator[tuple[RunningSequence, int]]:
        """What is left of the step in the end, `budget` tokens of it: seats and their tokens."""
        for i, running in enumerate(self._sequences):
            num_tokens = min(
                running.prefill_end - running.num_scheduled_tokens, token_budget // (len(self._sequences) - i)
            )
            if num_tokens:
                token_budget -= num_tokens
                yield running, num_tokens


class DeferredPrompts:
    """Long prompts that wait until another one is done, and are passed by others meanwhile."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._deferred: list[tuple[int, Sequence]] = []  # with tickets: those that have another one have gone

    def defer(self, sequence: Sequence) -> None:
        if sequence.is_held:  # at a group's desk
            self._waiting.requeue(sequence)
        self._waiting.hold(sequence)
        self._deferred.append((sequence.ticket, sequence))

    def release(self) -> None:
        """They are among the others again."""
        sequences, self._deferred = self.sequences(), []
        for sequence in sequences:
            self._waiting.requeue(sequence)

    def sequences(self) -> list[Sequence]:
        return [sequence for ticket, sequence in self._deferred if sequence.ticket == ticket]
