"""The waiting queue: who is in it and how much. Its order is the policy's, its bounds are in queue_bounds.py.

It counts choices: one prompt with `n` 128 is 128 sequences to be run. Those that are parked count too.
"""

from collections import Counter

from blockyard.services.scheduler.queue.output_lengths import OutputLimit
from blockyard.services.scheduler.queue.policy import Policy
from blockyard.services.scheduler.queue.queue_usage import QueueUsage
from blockyard.services.scheduler.sequences.requests import NONE, Amount, Choice, Request


class WaitingQueue:
    """Choices that are in no batch: new ones, and preempted ones with the tokens known so far."""

    def __init__(self, policy: Policy) -> None:
        self.peek = policy.peek
        self.usage = QueueUsage()
        self.output_limits: Counter[OutputLimit] = Counter()  # of those that wait, how many have each
        self.num_dequeued = 0  # choices that got a seat, so far
        self.num_dequeued_tokens = 0  # known ones of all that got a seat, so far
        self._policy = policy
        self._tickets = 0
        self._requests: Counter[str] = Counter()  # waiting choices of each request, parked ones among them
        self._num_choices = 0

    def __len__(self) -> int:
        """Choices that may be seated; parked ones are not among them."""
        return self._num_choices

    def push(self, choice: Choice) -> None:
        self._enter(choice)
        request = choice.request
        self._num_choices += 1
        self._count(choice)
        if not request.accepted and not request.attempt:
            self.usage.on_newcomer(request)

    def park(self, choice: Choice) -> None:
        """It will be pushed once a sibling has computed their prompt. Until then it only counts."""
        self._count(choice)

    def unpark(self, choice: Choice) -> None:
        self._uncount(choice)

    def dequeue(self, choice: Choice) -> None:
        """As `discard`, for a seat."""
        self.num_dequeued += 1
        self.num_dequeued_tokens += choice.known
        self.discard(choice)

    def discard(self, choice: Choice) -> None:
        """Takes a choice out, wherever it stands; nothing happens if it is not in."""
        if not choice.ticket:
            return
        choice.ticket = 0
        self._num_choices -= 1
        self._uncount(choice)
        if choice.is_held:
            choice.is_held = False
        else:
            self._policy.remove(choice)

    def hold(self, choice: Choice) -> None:
        """It waits on, but somewhere else than in the order of the policy."""
        self._policy.remove(choice)
        self._tickets += 1
        choice.ticket, choice.is_held = self._tickets, True

    def requeue(self, choice: Choice) -> None:
        """One that was set aside is among the others again."""
        choice.is_held = False
        self._enter(choice)

    def add_tokens(self, choice: Choice, num_tokens: int) -> None:
        """A waiting choice learned of more tokens, from plans that were in flight when it was preempted."""
        if choice.ticket:
            more = Amount(0, num_tokens)
            choice.counted = choice.counted.plus(more)
            self.usage.add(choice.request.owner, more)

    def on_accepted(self, request: Request) -> None:
        """It gives way to nobody any more."""
        self.usage.remove_newcomer(request)

    def _count(self, choice: Choice) -> None:
        self._requests[choice.request.id] += 1
        choice.counted = Amount(choice.width, choice.width * choice.known)
        self.usage.add(choice.request.owner, choice.counted)
        self.output_limits[_limit(choice.request)] += choice.width

    def _uncount(self, choice: Choice) -> None:
        request, amount = choice.request, choice.counted
        limit = _limit(request)
        self.output_limits[limit] -= choice.width
        if not self.output_limits[limit]:
            del self.output_limits[limit]
        choice.counted, choice.width = NONE, 1
        self._requests[request.id] -= 1
        if not self._requests[request.id]:
            del self._requests[request.id]
            self.usage.remove_newcomer(request)
        self.usage.add(request.owner, NONE.less(amount))

    def _enter(self, choice: Choice) -> None:
        self._tickets += 1
        choice.ticket = self._tickets
        self._policy.push(choice)


def _limit(request: Request) -> OutputLimit:
    return OutputLimit(request.frame.sampling.max_tokens, request.fills_limit)
