"""The waiting queue. A policy orders it, and queue_bounds.py bounds it.

It counts sequences: a request with `n` 128 is 128 of them. Parked sequences count too, but cannot be scheduled yet.
"""

from collections import Counter

from blockyard.services.scheduler.queue.output_lengths import OutputLengths, OutputLimit
from blockyard.services.scheduler.queue.policy import Policy
from blockyard.services.scheduler.queue.queue_usage import QueueUsage
from blockyard.services.scheduler.sequences.requests import NO_AMOUNT, QueueAmount, Request, Sequence


class WaitingQueue:
    """Sequences that do not run: new ones, and preempted ones with the tokens that they have so far."""

    def __init__(self, policy: Policy) -> None:
        self.peek = policy.peek
        self.policy = policy
        self.usage = QueueUsage()
        self.output_lengths = OutputLengths()  # of sequences that have ended
        self.output_limits: Counter[OutputLimit] = Counter()  # numbers of waiting sequences
        self.num_dequeued = 0  # since the start
        self.num_dequeued_tokens = 0  # tokens of all dequeued sequences
        self._tickets = 0
        self._requests: Counter[str] = Counter()  # waiting and parked sequences by request
        self.num_sequences = 0

    def __len__(self) -> int:
        """Sequences that may be scheduled, without parked ones."""
        return self.num_sequences

    def push(self, sequence: Sequence) -> None:
        self._enter(sequence)
        request = sequence.request
        self.num_sequences += 1
        self._count(sequence)
        if not request.accepted and not request.attempt:
            self.usage.add_unaccepted(request)

    def park(self, sequence: Sequence) -> None:
        """Counts a sequence that is pushed only when another one of its request has computed their prompt."""
        self._count(sequence)

    def unpark(self, sequence: Sequence) -> None:
        self._uncount(sequence)

    def dequeue(self, sequence: Sequence) -> None:
        """Takes out a sequence that is scheduled."""
        self.num_dequeued += 1
        self.num_dequeued_tokens += sequence.num_tokens
        self.discard(sequence)

    def discard(self, sequence: Sequence) -> None:
        """Takes out a sequence, held or not. Does nothing if it is not in the queue."""
        if not sequence.ticket:
            return
        was_held = sequence.is_held
        sequence.on_dequeued()
        self.num_sequences -= 1
        self._uncount(sequence)
        if not was_held:
            self.policy.remove(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Takes a sequence out of the policy's order. It still waits and counts, at a group's queue for example."""
        self.policy.remove(sequence)
        self._tickets += 1
        sequence.on_queued(self._tickets, is_held=True)

    def requeue(self, sequence: Sequence) -> None:
        """Puts a held sequence back into the policy's order."""
        self._enter(sequence)

    def add_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """A preempted sequence got more tokens, from plans that were in flight when it was preempted."""
        if sequence.ticket:
            more = QueueAmount(0, num_tokens)
            sequence.set_queue_amount(sequence.queue_amount.plus(more))
            self.usage.add(sequence.request.owner, more)

    def on_accepted(self, request: Request) -> None:
        """The request can no longer be refused to make room."""
        self.usage.remove_unaccepted(request)

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
            self.usage.remove_unaccepted(request)
        self.usage.add(request.owner, NO_AMOUNT.less(amount))

    def _enter(self, sequence: Sequence) -> None:
        self._tickets += 1
        sequence.on_queued(self._tickets, is_held=False)
        self.policy.push(sequence)


def _limit(request: Request) -> OutputLimit:
    return OutputLimit(request.frame.sampling.max_tokens, request.has_fixed_length)
