"""The waiting queue: bounded in requests and tokens, ordered by policy."""

from collections import Counter

from blockyard.services.scheduler.policy import Policy
from blockyard.services.scheduler.requests import Choice
from blockyard.shared.messages import Room

RETRY_AFTER_S = 1.0


class WaitingQueue:
    """Choices that are in no batch: new ones, and preempted ones with the tokens known so far.

    The bounds hold for newcomers; whoever was admitted before comes back whatever they say.
    """

    def __init__(self, policy: Policy, max_requests: int, max_tokens: int) -> None:
        self._policy = policy
        self.peek = policy.peek
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._tickets = 0
        self._requests: Counter[str] = Counter()  # waiting choices of each request
        self._num_tokens = 0
        self._num_choices = 0
        self._was_full = False  # when `news` was last asked for
        self._told_full = False  # somebody was told so since

    def __len__(self) -> int:
        return self._num_choices

    def room(self) -> Room:
        """For somebody who is told at once."""
        self._told_full = self._told_full or self.is_full()
        return Room(
            max(0, self._max_requests - len(self._requests)),
            max(0, self._max_tokens - self._num_tokens),
            RETRY_AFTER_S,
        )

    def news(self) -> Room | None:
        """For everybody: it became full or has room again, also if it was full only while an answer said so."""
        full = self.is_full()
        if full == self._was_full and (full or not self._told_full):
            return None
        self._was_full = self._told_full = full
        return self.room()

    def is_full(self) -> bool:
        return len(self._requests) >= self._max_requests or self._num_tokens >= self._max_tokens

    def takes(self, num_tokens: int) -> bool:
        """Whether a newcomer with so many tokens may wait. A long one is not kept out of an empty queue."""
        if self.is_full():
            return False
        return not self._num_choices or self._num_tokens + num_tokens <= self._max_tokens

    def push(self, choice: Choice) -> None:
        self._tickets += 1
        choice.ticket = self._tickets
        self._policy.push(choice)
        self._requests[choice.request.id] += 1
        self._num_tokens += choice.known
        self._num_choices += 1

    def discard(self, choice: Choice) -> None:
        """Takes a choice out, wherever it stands; nothing happens if it is not in."""
        if not choice.ticket:
            return
        choice.ticket = 0
        self._num_tokens -= choice.known
        self._num_choices -= 1
        self._requests[choice.request.id] -= 1
        if not self._requests[choice.request.id]:
            del self._requests[choice.request.id]
        self._policy.left(choice)

    def grow(self, choice: Choice, num_tokens: int) -> None:
        """A waiting choice learned of more tokens, from plans that were in flight when it was preempted."""
        if choice.ticket:
            self._num_tokens += num_tokens
