"""Which sequences decode in which plans of a worker with pipeline stages.

Each stage computes another plan, so as many plans are under way as there are stages, and those that are sent ahead. A
sequence decodes in the plans of its turn alone. The next plan of a turn may be sent before the result of the one before
it is in: the first stage gets the tokens from the worker's last one, which computes them while the first stage computes
the other turns. Chunks of prompts need no tokens, and run in plans of any turn. They get smaller as their context
grows: a stage waits for the slowest one.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from blockyard.services.scheduler.batch.decode_batch import DecodeBatch
from blockyard.services.scheduler.sequences.requests import RunningSequence

ROW_TOKENS = 512  # a decode beside others costs as much as reading so many tokens of context


@dataclass(slots=True)
class PipelineTurn:
    """The decodes of every S-th plan, with S stages."""

    batch: DecodeBatch
    members: dict[RunningSequence, int] = field(default_factory=dict)  # with the load of each
    load: int = 0  # of all members, in tokens
    plans: deque[int] = field(default_factory=deque)  # that are under way
    last_plan: int = 0

    def add(self, running: RunningSequence) -> None:
        self.members[running] = load = ROW_TOKENS + running.num_scheduled_tokens
        self.load += load

    def remove(self, running: RunningSequence) -> None:
        self.load -= self.members.pop(running)


class PipelineTurns:
    """The turns of a worker group. Without stages there are none, and no plan looks at them."""

    def __init__(self, batches: list[DecodeBatch], ahead: int) -> None:
        """batches: one for each stage, with the same `outside`. ahead: plans of a turn besides the oldest one."""
        self._turns, self._ahead = [PipelineTurn(batch) for batch in batches], ahead
        self._turn_of: dict[RunningSequence, PipelineTurn] = {}
        self._current = self._turns[-1]  # that the last plan was built for, or is being built for

    @property
    def batch(self) -> DecodeBatch:
        """Of the current turn."""
        return self._current.batch

    def free(self) -> list[PipelineTurn]:
        """Turns that may have another plan, in the order in which they are due."""
        first = self._turns.index(self._current) + 1
        return [turn for turn in (*self._turns[first:], *self._turns[:first]) if len(turn.plans) <= self._ahead]

    def begin(self, turn: PipelineTurn) -> None:
        """The next plan is of this turn. Sequences that it has too many of decode in another one from now on."""
        self._current = turn
        while turn.members:
            least, (running, load) = self._least(), next(reversed(turn.members.items()))
            if turn.load - least.load < load + ROW_TOKENS // 2:
                return  # it would make little difference
            if turn.batch.has(running):
                turn.batch.leave(running)
            self._move(running, least)

    def may_decode(self, running: RunningSequence) -> bool:
        """Whether a sequence may decode in the plan that is built. One without a turn gets that with the least load.

        Of plans under way it may need those of its turn, and those before: a later one would hold up the whole turn.
        """
        turn = self._turn_of.get(running)
        if turn is None:
            turn = self._least()
            self._move(running, turn)
        return turn is self._current and running.last_plan <= max(turn.last_plan, running.plan_clock.last_completed)

    def batch_of(self, running: RunningSequence) -> DecodeBatch | None:
        """The decode batch that a sequence is in; None: it is outside."""
        turn = self._turn_of.get(running)
        return turn.batch if turn is not None and turn.batch.has(running) else None

    def remove(self, running: RunningSequence) -> None:
        """A sequence has ended, or is preempted."""
        turn = self._turn_of.pop(running, None)
        if turn is not None:
            turn.remove(running)

    def on_sent(self, number: int) -> None:
        self._current.plans.append(number)
        self._current.last_plan = number

    def on_answered(self, number: int) -> None:
        for turn in self._turns:
            if turn.plans and turn.plans[0] == number:
                turn.plans.popleft()

    def _least(self) -> PipelineTurn:
        return min(self._turns, key=lambda one: one.load)

    def _move(self, running: RunningSequence, to: PipelineTurn) -> None:
        self.remove(running)
        to.add(running)
        self._turn_of[running] = to


def even_chunk(most: int, context: int, balanced_context: int) -> int:
    """Returns how many tokens behind `context` others take as long as the first `most` of a prompt; at least one.

    balanced_context: see `Geometry`; 0: attention costs nothing.

    A token behind c others costs 1 + c / B, with B the balanced context, so n of them cost n + n * (c + n / 2) / B.
    """
    if not balanced_context or not context:
        return most
    first, slope = most + most * most / (2 * balanced_context), 1 + context / balanced_context
    return max(int(balanced_context * (math.sqrt(slope * slope + 2 * first / balanced_context) - slope)), 1)


def tokens_of_cost(num_tokens: int, context: int, balanced_context: int) -> int:
    """Returns how many first tokens of a prompt take as long as `num_tokens` behind `context` others."""
    if not balanced_context or not context:
        return num_tokens
    cost = num_tokens + num_tokens * (context + num_tokens / 2) / balanced_context
    return math.ceil(balanced_context * (math.sqrt(1 + 2 * cost / balanced_context) - 1))
