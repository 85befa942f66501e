"""The bounds of the waiting queue: what fits, which request is refused to make room, and what gateways are told."""

from dataclasses import dataclass

from blockyard.services.scheduler.queue.wait_estimate import WaitEstimate
from blockyard.services.scheduler.queue.waiting_queue import Owner, WaitingQueue
from blockyard.services.scheduler.sequences.requests import QueueAmount, Request
from blockyard.shared.messages import QueueCapacity

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 600.0
MAX_PROMPTS = 2**16  # waiting ones of calls with many, which count as one entry each: they take 0.1 GB


@dataclass(frozen=True, slots=True)
class QueueLimits:
    max_entries: int
    max_tokens: int
    max_delay_s: float | None = None  # maximum wait of a new request


class QueueBounds:
    """Bounds for new requests. An accepted request that has to wait again always fits.

    Lines of batch files take the room that online requests leave, and count for nothing when an online request comes.
    """

    def __init__(self, waiting: WaitingQueue, wait: WaitEstimate, limits: QueueLimits) -> None:
        self.max_delay_s = limits.max_delay_s
        self._waiting, self._wait = waiting, wait
        self._max_entries, self._max_tokens = limits.max_entries, limits.max_tokens
        self._max_sequences = max(limits.max_entries, MAX_PROMPTS)
        self.is_asleep = False  # all workers sleep
        self.was_full = False  # at the last call of `changed_capacity`
        self.told_full = False  # since then an answer to a gateway said so

    def capacity(self) -> QueueCapacity:
        """The free capacity, for an answer to one gateway."""
        waits, full = self._waiting.usage.amount, self.is_full()
        self.told_full = self.told_full or full
        tenant, user = (self._waiting.usage.largest_user(self._share) if full else None) or (None, None)
        return QueueCapacity(
            max(0, min(self._max_entries - waits.entries, self._max_sequences - waits.sequences)),
            0 if self._is_slow(waits) else max(0, self._max_tokens - waits.tokens),
            max(LEAST_RETRY_S, self.wait_s),
            tenant,
            user,
            self.is_asleep,
        )

    def changed_capacity(self) -> QueueCapacity | None:
        """The capacity for all gateways if the queue became full or has room again since the last call.

        That includes a queue that was full only for a moment, if an answer said so.
        """
        full = self.is_full()
        if full == self.was_full and (full or not self.told_full):
            return None
        self.was_full = self.told_full = full
        return self.capacity()

    def is_full(self) -> bool:
        return self._holds_most() or self._is_slow(self._waiting.usage.amount)

    def is_long(self) -> bool:
        """Whether the queue is full by its wait alone, and not by entries or tokens."""
        return not self._holds_most() and self._is_slow(self._waiting.usage.amount)

    def make_room(self, owner: Owner, amount: QueueAmount) -> list[Request] | None:
        """Requests to refuse so that a new request with `amount` may wait; None if it is to be refused itself.

        The newest request of the tenant with the largest share of the queue is refused, also if that is the new one.
        An empty queue takes a request of any size.
        """
        waits = self._waiting.usage.amount

        def lacks(gone: QueueAmount) -> bool:
            left = waits.less(gone)
            after = left.plus(amount)
            if not left.sequences:
                return False
            return self._is_too_much(after) or self._is_slow(left)

        return self._waiting.usage.evict_for(owner, amount, lacks, self._share)

    def takes_batch_line(self, amount: QueueAmount) -> bool:
        """Whether a new line of a batch file may wait. An empty queue takes a line of any size."""
        waits = self._waiting.usage.amount.plus(self._waiting.batch_usage.amount)
        return not waits.sequences or not self._is_too_much(waits.plus(amount))

    @property
    def wait_s(self) -> float:
        """Estimated seconds until a new request behind the whole queue is scheduled."""
        amount = self._waiting.usage.amount
        return min(MOST_RETRY_S, self._wait.seconds(amount)) if amount.sequences else 0.0

    def _holds_most(self) -> bool:
        return self._is_too_much(self._waiting.usage.amount.plus(QueueAmount(1, 1, 1)))

    def _is_too_much(self, amount: QueueAmount) -> bool:
        return (
            amount.entries > self._max_entries
            or amount.sequences > self._max_sequences
            or amount.tokens > self._max_tokens
        )

    def _is_slow(self, amount: QueueAmount) -> bool:
        """Whether a new request behind `amount` would wait for the maximum delay."""
        return self.max_delay_s is not None and self._wait.seconds(amount) >= self.max_delay_s

    def _share(self, amount: QueueAmount) -> tuple[float, int]:
        """The share of the queue's bounds, by entries, sequences or tokens, whichever is larger."""
        of_entries, of_sequences = amount.entries / self._max_entries, amount.sequences / self._max_sequences
        return (max(of_entries, of_sequences, amount.tokens / self._max_tokens), amount.tokens)
