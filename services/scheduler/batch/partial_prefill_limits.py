"""How prompts in the making divide what decodes leave of a step, so that a long one does not keep out the short ones.

With one partial prefill at a time (the default) prompts are computed in their order, and the one that comes to its
step's end goes on in the next. With more, long prompts come last in each plan: they leave room for others, and take
what these do not need.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Choice, Seat
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillShares:
    max_partial: int = 1  # prompts that may be computed in parts at a time
    max_long: int = 1  # of those, long ones
    long_tokens: int = 0  # longer prompts are long; 0: 4 % of the model's length
    whole: bool = False  # no chunked prefill: a prompt waits for a step that takes all of it

    def is_long(self, group: WorkerGroup, num_tokens: int) -> bool:
        """So many tokens are to be computed of a prompt."""
        return self.max_partial > 1 and num_tokens > (self.long_tokens or group.max_model_len // 25)


class LongPrompts:
    """Those of one plan."""

    def __init__(self, shares: PrefillShares, budget: int) -> None:
        self._seats: list[Seat] = []
        self._shares = shares
        self._share = max(1, budget // shares.max_partial)

    @property
    def reserved(self) -> int:
        """Tokens of the step that others leave to them."""
        return len(self._seats) * self._share

    def add(self, seat: Seat) -> None:
        self._seats.append(seat)

    def take_more(self) -> bool:
        return len(self._seats) < self._shares.max_long

    def leave_part(self, could_be_whole: bool) -> bool:
        """Whether another prompt may be computed in part; `could_be_whole`: another step would take all of it."""
        return len(self._seats) < self._shares.max_partial and not (self._shares.whole and could_be_whole)

    def divide(self, budget: int) -> Iterator[tuple[Seat, int]]:
        """What is left of the step in the end, `budget` tokens of it: seats and their tokens."""
        for i, seat in enumerate(self._seats):
            num_tokens = min(seat.prefill_end - seat.granted, budget // (len(self._seats) - i))
            if num_tokens:
                budget -= num_tokens
                yield seat, num_tokens


class HeldBack:
    """Long prompts that wait until another one is done, and are passed by others meanwhile."""

    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        self._held: list[tuple[int, Choice]] = []  # with tickets: those that have another one have gone

    def hold(self, choice: Choice) -> None:
        if choice.is_held:  # at a group's desk
            self._waiting.requeue(choice)
        self._waiting.hold(choice)
        self._held.append((choice.ticket, choice))

    def release(self) -> None:
        """They are among the others again."""
        choices, self._held = self.choices(), []
        for choice in choices:
            self._waiting.requeue(choice)

    def choices(self) -> list[Choice]:
        return [choice for ticket, choice in self._held if choice.ticket == ticket]
