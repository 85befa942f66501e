"""The waiting queue: bounded in requests, tokens and time, ordered by policy."""

from collections import Counter

from blockyard.services.scheduler.ledger import Ledger, Owner
from blockyard.services.scheduler.policy import Policy
from blockyard.services.scheduler.requests import Choice, Request
from blockyard.services.scheduler.service_rate import ServiceRate
from blockyard.shared.messages import Room

LEAST_RETRY_S, MOST_RETRY_S = 1.0, 600.0


class WaitingQueue:
    """Choices that are in no batch: new ones, and preempted ones with the tokens known so far.

    The bounds hold for newcomers; whoever was promised to be served comes back whatever they say.
    """

    def __init__(self, policy: Policy, max_requests: int, max_tokens: int, max_delay_s: float | None = None) -> None:
        self._policy = policy
        self.peek = policy.peek
        self.rate = ServiceRate()
        self._max_requests, self._max_tokens, self._max_delay_s = max_requests, max_tokens, max_delay_s
        self._ledger = Ledger()
        self._tickets = 0
        self._requests: Counter[str] = Counter()  # waiting choices of each request
        self._num_choices = 0
        self._was_full = False  # when `news` was last asked for
        self._told_full = False  # somebody was told so since

    def __len__(self) -> int:
        return self._num_choices

    @property
    def num_tokens(self) -> int:
        return self._ledger.num_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens that may wait: as many as are served within the longest wait, where that is less."""
        rate = self.rate.tokens_per_s
        if self._max_delay_s is None or rate is None:
            return self._max_tokens
        return min(self._max_tokens, int(self._max_delay_s * rate))

    def room(self) -> Room:
        """For somebody who is told at once."""
        full = self.is_full()
        self._told_full = self._told_full or full
        tenant, user = (self._ledger.heaviest() if full else None) or (None, None)
        return Room(
            max(0, self._max_requests - len(self._requests)),
            max(0, self.max_tokens - self.num_tokens),
            self._retry_after_s(),
            tenant,
            user,
        )

    def news(self) -> Room | None:
        """For everybody: it became full or has room again, also if it was full only while an answer said so."""
        full = self.is_full()
        if full == self._was_full and (full or not self._told_full):
            return None
        self._was_full = self._told_full = full
        return self.room()

    def is_full(self) -> bool:
        return len(self._requests) >= self._max_requests or (
            self._num_choices > 0 and self.num_tokens >= self.max_tokens
        )

    def is_long(self) -> bool:
        """It is the wait that is at its bound, and not the number of those who wait."""
        return len(self._requests) < self._max_requests and self.num_tokens < self._max_tokens

    def make_room(self, owner: Owner, num_tokens: int) -> list[Request] | None:
        """Who has to go so that a newcomer with so many tokens may wait; None if it may not.

        The newest request of the tenant with the most tokens gives way, whoever came. A long one is not kept out of
        an empty queue.
        """

        def lacks(num_gone: int, num_freed: int) -> bool:
            left, tokens = len(self._requests) - num_gone, self.num_tokens - num_freed
            return left >= self._max_requests or (left > 0 and tokens + num_tokens > self.max_tokens)

        return self._ledger.give_way(owner, num_tokens, lacks)

    def push(self, choice: Choice) -> None:
        self._tickets += 1
        choice.ticket = self._tickets
        self._policy.push(choice)
        request = choice.request
        self._requests[request.id] += 1
        self._num_choices += 1
        self._ledger.add(request, choice.known)
        if not request.accepted and not request.attempt:
            self._ledger.came(request)

    def take(self, choice: Choice) -> None:
        """As `discard`, for a seat."""
        self.rate.served(choice.known)
        self.discard(choice)

    def discard(self, choice: Choice) -> None:
        """Takes a choice out, wherever it stands; nothing happens if it is not in."""
        if not choice.ticket:
            return
        choice.ticket = 0
        request = choice.request
        self._num_choices -= 1
        self._requests[request.id] -= 1
        if not self._requests[request.id]:
            del self._requests[request.id]
            self._ledger.settled(request)
        self._ledger.add(request, -choice.known)
        if choice.aside:
            choice.aside = False
        else:
            self._policy.left(choice)

    def set_aside(self, choice: Choice) -> None:
        """It waits on, but somewhere else than in the order of the policy."""
        self._policy.left(choice)
        self._tickets += 1
        choice.ticket, choice.aside = self._tickets, True

    def put_back(self, choice: Choice) -> None:
        """One that was set aside is among the others again."""
        self._tickets += 1
        choice.ticket, choice.aside = self._tickets, False
        self._policy.push(choice)

    def promised(self, request: Request) -> None:
        """It gives way to nobody any more."""
        self._ledger.settled(request)

    def grow(self, choice: Choice, num_tokens: int) -> None:
        """A waiting choice learned of more tokens, from plans that were in flight when it was preempted."""
        if choice.ticket:
            self._ledger.add(choice.request, num_tokens)

    def _retry_after_s(self) -> float:
        """Until what waits now has been served, as far as one can tell."""
        rate = self.rate.tokens_per_s
        if not self._num_choices or rate is None:
            return LEAST_RETRY_S
        return min(MOST_RETRY_S, max(LEAST_RETRY_S, self.num_tokens / max(rate, 1e-9)))
