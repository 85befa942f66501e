"""The one place where back-pressure is made: how much may wait, who gives way, what is told of it."""

from blockyard.services.scheduler.ledger import Owner
from blockyard.services.scheduler.requests import Request
from blockyard.services.scheduler.waiting import WaitingQueue
from blockyard.shared.messages import Room

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 600.0


class QueueBounds:
    """They hold for newcomers; whoever was promised to be served comes back whatever they say."""

    def __init__(
        self, waiting: WaitingQueue, max_requests: int, max_tokens: int, max_delay_s: float | None = None
    ) -> None:
        self.max_delay_s = max_delay_s
        self._waiting, self._max_requests, self._max_tokens = waiting, max_requests, max_tokens
        self.asleep = False  # nothing is served until somebody wakes the workers up
        self._was_full = False  # when `news` was last asked for
        self._told_full = False  # somebody was told so since

    @property
    def max_tokens(self) -> int:
        """Tokens that may wait: as many as are served within the longest wait, where that is less."""
        rate = self._waiting.rate.tokens_per_s
        if self.max_delay_s is None or rate is None:
            return self._max_tokens
        return min(self._max_tokens, int(self.max_delay_s * rate))

    def room(self) -> Room:
        """For somebody who is told at once."""
        waiting, full = self._waiting, self.is_full()
        self._told_full = self._told_full or full
        tenant, user = (waiting.ledger.heaviest() if full else None) or (None, None)
        return Room(
            max(0, self._max_requests - waiting.num_requests),
            max(0, self.max_tokens - waiting.ledger.num_tokens),
            max(LEAST_RETRY_S, self.wait_s),
            tenant,
            user,
            self.asleep,
        )

    def news(self) -> Room | None:
        """For everybody: it became full or has room again, also if it was full only while an answer said so."""
        full = self.is_full()
        if full == self._was_full and (full or not self._told_full):
            return None
        self._was_full = self._told_full = full
        return self.room()

    def is_full(self) -> bool:
        waiting = self._waiting
        return waiting.num_requests >= self._max_requests or (
            len(waiting) > 0 and waiting.ledger.num_tokens >= self.max_tokens
        )

    def is_long(self) -> bool:
        """It is the wait that is at its bound, and not what waits."""
        waiting = self._waiting
        return waiting.num_requests < self._max_requests and waiting.ledger.num_tokens < self._max_tokens

    def make_room(self, owner: Owner, num_tokens: int) -> list[Request] | None:
        """Who has to go so that a newcomer with so many tokens may wait; None if it may not.

        The newest request of the tenant with the most tokens gives way, whoever came. A long one is not kept out of
        an empty queue.
        """
        waiting = self._waiting

        def lacks(num_gone: int, num_freed: int) -> bool:
            left, tokens = waiting.num_requests - num_gone, waiting.ledger.num_tokens - num_freed
            return left >= self._max_requests or (left > 0 and tokens + num_tokens > self.max_tokens)

        return waiting.ledger.give_way(owner, num_tokens, lacks)

    @property
    def wait_s(self) -> float:
        """Until what waits now has been served, as far as one can tell."""
        rate = self._waiting.rate.tokens_per_s
        if not len(self._waiting) or rate is None:
            return 0.0
        return min(MOST_RETRY_S, self._waiting.ledger.num_tokens / max(rate, 1e-9))
