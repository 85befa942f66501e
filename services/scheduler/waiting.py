"""The waiting queue: who is in it and how much. Its order is the policy's, its bounds are in queue_bounds.py."""

from collections import Counter

from blockyard.services.scheduler.ledger import Ledger
from blockyard.services.scheduler.policy import Policy
from blockyard.services.scheduler.requests import Choice, Request
from blockyard.services.scheduler.service_rate import ServiceRate


class WaitingQueue:
    """Choices that are in no batch: new ones, and preempted ones with the tokens known so far."""

    def __init__(self, policy: Policy) -> None:
        self.peek = policy.peek
        self.rate = ServiceRate()
        self.ledger = Ledger()
        self._policy = policy
        self._tickets = 0
        self._requests: Counter[str] = Counter()  # waiting choices of each request
        self._num_choices = 0

    def __len__(self) -> int:
        return self._num_choices

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    def push(self, choice: Choice) -> None:
        self._enter(choice)
        request = choice.request
        self._requests[request.id] += 1
        self._num_choices += 1
        self.ledger.add(request, choice.known)
        if not request.accepted and not request.attempt:
            self.ledger.came(request)

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
            self.ledger.settled(request)
        self.ledger.add(request, -choice.known)
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
        choice.aside = False
        self._enter(choice)

    def grow(self, choice: Choice, num_tokens: int) -> None:
        """A waiting choice learned of more tokens, from plans that were in flight when it was preempted."""
        if choice.ticket:
            self.ledger.add(choice.request, num_tokens)

    def promised(self, request: Request) -> None:
        """It gives way to nobody any more."""
        self.ledger.settled(request)

    def _enter(self, choice: Choice) -> None:
        self._tickets += 1
        choice.ticket = self._tickets
        self._policy.push(choice)
