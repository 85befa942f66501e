"""Who is next, and who gives way: the order of those who wait, with whatever state it needs."""

import heapq
from collections.abc import Callable
from typing import Protocol

from blockyard.services.scheduler.sequences.requests import Choice, Key
from blockyard.shared.messages import TenantShare

COMPACT_FROM = 64  # stale entries beyond the live ones


class Policy(Protocol):
    """Orders the waiting choices, and ranks those that run.

    The first number of a key is a class. Those of a lower class are served first, and may take the seats and blocks
    of those of a higher one; within a class nobody gives way to somebody who waits.
    """

    def push(self, choice: Choice) -> None:
        """It waits, under its ticket: an entry whose ticket is no longer the choice's is stale."""

    def peek(self) -> Choice | None:
        """Who is next."""

    def remove(self, choice: Choice) -> None:
        """It waits no more."""

    def key(self, choice: Choice) -> Key:
        """What it would be ranked by if it were seated now. Keys of two choices differ."""

    def preemptible_by(self, seated: Choice, rank: int) -> bool:
        """Whether one that runs gives way to one of this class."""

    def over_share(self, choice: Choice, num_seats: int) -> bool:
        """Whether its owner has more here than his share of so many seats, and others may come."""

    def on_scheduled(self, choice: Choice, num_tokens: int) -> None:
        """It runs, and so many tokens are computed for it that it had not paid for."""

    def on_freed(self, choice: Choice) -> None:
        """It runs no more."""

    def largest_tenants(self, most: int) -> list[TenantShare]:
        """For metrics: so many tenants at most, where tenants are told apart."""


class SequenceHeap:
    """Waiting choices by key."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Choice]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, key: Key, choice: Choice) -> None:
        self._num_live += 1
        heapq.heappush(self._heap, (key, choice.ticket, choice))

    def remove(self) -> None:
        """One of them has another ticket now, or none."""
        self._num_live -= 1
        if not self._num_live:
            self._heap.clear()  # stale entries hold requests that have ended, with their prompts
        elif len(self._heap) > 2 * self._num_live + COMPACT_FROM:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)

    def peek(self) -> Choice | None:
        while self._heap:
            _, ticket, choice = self._heap[0]
            if choice.ticket == ticket:
                return choice
            heapq.heappop(self._heap)
        return None


class OrderedPolicy:
    """One order for all, which nothing that happens changes."""

    def __init__(self, class_of: Callable[[Choice], int]) -> None:
        self._class_of = class_of
        self._queue = SequenceHeap()
        self.peek = self._queue.peek

    def push(self, choice: Choice) -> None:
        self._queue.push(self.key(choice), choice)

    def remove(self, choice: Choice) -> None:
        self._queue.remove()

    def key(self, choice: Choice) -> Key:
        return (self._class_of(choice), choice.request.arrival, choice.index)

    def preemptible_by(self, seated: Choice, rank: int) -> bool:
        return seated.key[0] > rank

    def over_share(self, choice: Choice, num_seats: int) -> bool:
        return False

    def on_scheduled(self, choice: Choice, num_tokens: int) -> None:
        pass

    def on_freed(self, choice: Choice) -> None:
        pass

    def largest_tenants(self, most: int) -> list[TenantShare]:
        return []


def fcfs() -> Policy:
    """First come, first served."""
    return OrderedPolicy(lambda choice: 0)


def priority() -> Policy:
    """The lower a request's `priority` the earlier; of the same, first come, first served."""
    return OrderedPolicy(lambda choice: choice.request.frame.priority)
