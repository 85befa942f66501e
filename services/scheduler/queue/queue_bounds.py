"""The one place where back-pressure is made: how much may wait, who gives way, what is told of it."""

from blockyard.services.scheduler.queue.queue_usage import Owner
from blockyard.services.scheduler.queue.wait_estimate import WaitEstimate
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import QueueAmount, Request
from blockyard.services.scheduler.workers.worker_groups import WorkerGroup
from blockyard.shared.messages import QueueCapacity

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 600.0


class QueueBounds:
    """They hold for newcomers. A request that was accepted waits again, if it has to, whatever they say."""

    def __init__(
        self,
        waiting: WaitingQueue,
        groups: dict[int, WorkerGroup],
        max_choices: int,
        max_tokens: int,
        max_delay_s: float | None = None,
    ) -> None:
        self.max_delay_s = max_delay_s
        self._waiting, self.wait = waiting, WaitEstimate(waiting, groups)
        self._max_sequences, self._max_tokens = max_choices, max_tokens
        self.is_asleep = False  # nothing is served until somebody wakes the workers up
        self._was_full = False  # when `news` was last asked for
        self._told_full = False  # somebody was told so since

    def set_asleep(self, is_asleep: bool) -> None:
        self.is_asleep = is_asleep

    def capacity(self) -> QueueCapacity:
        """For a gateway that is told at once."""
        waits, full = self._waiting.usage.amount, self.is_full()
        self._told_full = self._told_full or full
        tenant, user = (self._waiting.usage.largest_user(self._share) if full else None) or (None, None)
        return QueueCapacity(
            max(0, self._max_sequences - waits.sequences),
            0 if self._is_slow(waits) else max(0, self._max_tokens - waits.tokens),
            max(LEAST_RETRY_S, self.wait_s),
            tenant,
            user,
            self.is_asleep,
        )

    def news(self) -> QueueCapacity | None:
        """For everybody: it became full or has room again, also if it was full only while an answer said so."""
        full = self.is_full()
        if full == self._was_full and (full or not self._told_full):
            return None
        self._was_full = self._told_full = full
        return self.capacity()

    def is_full(self) -> bool:
        return self._holds_most() or self._is_slow(self._waiting.usage.amount)

    def is_long(self) -> bool:
        """It is the wait that is at its bound, and not what waits."""
        return not self._holds_most() and self._is_slow(self._waiting.usage.amount)

    def make_room(self, owner: Owner, amount: QueueAmount) -> list[Request] | None:
        """Requests that have to go so that a newcomer with so much may wait; None if it may not.

        The newest request of the tenant with the largest share of the queue gives way, the newcomer too if it is that
        tenant's. One that is larger than the queue is not kept out of an empty one.
        """
        waits = self._waiting.usage.amount

        def lacks(gone: QueueAmount) -> bool:
            left = waits.less(gone)
            after = left.plus(amount)
            if not left.sequences:
                return False
            return after.sequences > self._max_sequences or after.tokens > self._max_tokens or self._is_slow(left)

        return self._waiting.usage.evict_for(owner, amount, lacks, self._share)

    @property
    def wait_s(self) -> float:
        """Until a newcomer has a seat behind all that waits, as far as that is known."""
        return min(MOST_RETRY_S, self.wait.seconds(self._waiting.usage.amount))

    def _holds_most(self) -> bool:
        waits = self._waiting.usage.amount
        return waits.sequences >= self._max_sequences or waits.tokens >= self._max_tokens

    def _is_slow(self, amount: QueueAmount) -> bool:
        """A newcomer behind so much would wait as long as any may."""
        return self.max_delay_s is not None and self.wait.seconds(amount) >= self.max_delay_s

    def _share(self, amount: QueueAmount) -> tuple[float, int]:
        """Of what may wait, by choices or by tokens, whichever is more of it."""
        return (max(amount.sequences / self._max_sequences, amount.tokens / self._max_tokens), amount.tokens)
