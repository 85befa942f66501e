"""The waiting queue: who is in it and how much. Its order is the policy's, its bounds are in queue_bounds.py.

It counts choices: one prompt with `n` 128 is 128 sequences to be run. Those that are parked count too.
"""

from collections import Counter

from blockyard.services.scheduler.queue.output_lengths import OutputLengths, OutputLimit
from blockyard.services.scheduler.queue.policy import Policy
from blockyard.services.scheduler.queue.queue_usage import QueueUsage
from blockyard.services.scheduler.sequences.requests import NO_AMOUNT, QueueAmount, Request, Sequence


class WaitingQueue:
    """Choices that are in no batch: new ones, and preempted ones with the tokens known so far."""

    def __init__(self, policy: Policy) -> None:
        self.peek = policy.peek
        self.policy = policy
        self.usage = QueueUsage()
        self.output_lengths = OutputLengths()  # of sequences that have ended
        self.output_limits: Counter[OutputLimit] = Counter()  # of those that wait, how many have each
        self.num_dequeued = 0  # choices that got a seat, so far
        self.num_dequeued_tokens = 0  # known ones of all that got a seat, so far
        self._tickets = 0
        self._requests: Counter[str] = Counter()  # waiting choices of each request, parked ones among them
        self._num_sequences = 0

    def __len__(self) -> int:
        """Choices that may be seated; parked ones are not among them."""
        return self._num_sequences

    def push(self, sequence: Sequence) -> None:
        self._enter(sequence)
        request = sequence.request
        self._num_sequences += 1
        self._count(sequence)
        if not request.accepted and not request.attempt:
            self.usage.on_newcomer(request)

    def park(self, sequence: Sequence) -> None:
        """It will be pushed once a sibling has computed their prompt. Until then it only counts."""
        self._count(sequence)

    def unpark(self, sequence: Sequence) -> None:
        self._uncount(sequence)

    def dequeue(self, sequence: Sequence) -> None:
        """As `discard`, for a seat."""
        self.num_dequeued += 1
        self.num_dequeued_tokens += sequence.num_tokens
        self.discard(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Takes a choice out, wherever it stands; nothing happens if it is not in."""
        if not sequence.ticket:
            return
        was_held = sequence.is_held
        sequence.on_dequeued()
        self._num_sequences -= 1
        self._uncount(sequence)
        if not was_held:
            self.policy.remove(sequence)

    def hold(self, sequence: Sequence) -> None:
        """It waits on, but somewhere else than in the order of the policy."""
        self.policy.remove(sequence)
        self._tickets += 1
        sequence.on_queued(self._tickets, is_held=True)

    def requeue(self, sequence: Sequence) -> None:
        """One that was set aside is among the others again."""
        self._enter(sequence)

    def add_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """A waiting choice learned of more tokens, from plans that were in flight when it was preempted."""
        if sequence.ticket:
            more = QueueAmount(0, num_tokens)
            sequence.set_queue_amount(sequence.queue_amount.plus(more))
            self.usage.add(sequence.request.owner, more)

    def on_accepted(self, request: Request) -> None:
        """It gives way to nobody any more."""
        self.usage.remove_newcomer(request)

    def _count(self, sequence: Sequence) -> None:
        self._requests[sequence.request.id] += 1
        sequence.set_queue_amount(QueueAmount(sequence.num_beams, sequence.num_beams * sequence.num_tokens))
        self.usage.add(sequence.request.owner, sequence.queue_amount)
        self.output_limits[_limit(sequence.request)] += sequence.num_beams

    def _uncount(self, sequence: Sequence) -> None:
        request, amount = sequence.request, sequence.queue_amount
        limit = _limit(request)
        self.output_limits[limit] -= sequence.num_beams
        if not self.output_limits[limit]:
            del self.output_limits[limit]
        sequence.clear_queue_amount()
        self._requests[request.id] -= 1
        if not self._requests[request.id]:
            del self._requests[request.id]
            self.usage.remove_newcomer(request)
        self.usage.add(request.owner, NO_AMOUNT.less(amount))

    def _enter(self, sequence: Sequence) -> None:
        self._tickets += 1
        sequence.on_queued(self._tickets, is_held=False)
        self.policy.push(sequence)


def _limit(request: Request) -> OutputLimit:
    return OutputLimit(request.frame.sampling.max_tokens, request.has_fixed_length)
