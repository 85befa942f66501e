"""Who is next, and who gives way: the order of those who wait, with whatever state it needs."""

import heapq
from typing import Protocol

from blockyard.services.scheduler.sequences.requests import Key, Sequence
from blockyard.shared.messages import TenantShare

COMPACT_FROM = 64  # stale entries beyond the live ones


class Policy(Protocol):
    """Orders the waiting choices, and ranks those that run.

    The first number of a key is a class. Those of a lower class are served first, and may take the seats and blocks
    of those of a higher one; within a class nobody gives way to somebody who waits.
    """

    def push(self, sequence: Sequence) -> None:
        """It waits, under its ticket: an entry whose ticket is no longer the choice's is stale."""

    def peek(self) -> Sequence | None:
        """Who is next."""

    def remove(self, sequence: Sequence) -> None:
        """It waits no more."""

    def key(self, sequence: Sequence) -> Key:
        """What it would be ranked by if it were seated now. Keys of two choices differ."""

    def preemptible_by(self, seated: Sequence, rank: int) -> bool:
        """Whether one that runs gives way to one of this class."""

    def over_share(self, sequence: Sequence, num_seats: int) -> bool:
        """Whether its owner has more here than his share of so many seats, and others may come."""

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """It runs, and so many tokens are computed for it that it had not paid for."""

    def on_freed(self, sequence: Sequence) -> None:
        """It runs no more."""

    def largest_tenants(self, most: int) -> list[TenantShare]:
        """For metrics: so many tenants at most, where tenants are told apart."""


class SequenceHeap:
    """Waiting choices by key."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Sequence]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, key: Key, sequence: Sequence) -> None:
        self._num_live += 1
        heapq.heappush(self._heap, (key, sequence.ticket, sequence))

    def remove(self) -> None:
        """One of them has another ticket now, or none."""
        self._num_live -= 1
        if not self._num_live:
            self._heap.clear()  # stale entries hold requests that have ended, with their prompts
        elif len(self._heap) > 2 * self._num_live + COMPACT_FROM:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapq.heapify(self._heap)

    def peek(self) -> Sequence | None:
        while self._heap:
            _, ticket, sequence = self._heap[0]
            if sequence.ticket == ticket:
                return sequence
            heapq.heappop(self._heap)
        return None
