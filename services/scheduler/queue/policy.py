"""The interface of scheduling policies, the heap of waiting sequences that they share, and the order by arrival."""

import heapq
from typing import Protocol

from blockyard.services.scheduler.sequences.requests import Key, Sequence
from blockyard.shared.messages import TenantShare

COMPACT_FROM = 64  # stale entries beyond the live ones


class Policy(Protocol):
    """Orders the waiting sequences and ranks the running ones.

    The first number of a key is a class. Lower classes are scheduled first, and a waiting sequence may preempt running
    ones of higher classes. Within a class no running sequence is preempted for a waiting one.
    """

    @property
    def has_classes(self) -> bool:
        """False: all sequences that wait and run are of one class."""

    def push(self, sequence: Sequence) -> None:
        """The sequence waits, under its current ticket. With another ticket, or none, the entry is stale."""

    def peek(self) -> Sequence | None:
        """The next sequence to schedule."""

    def remove(self, sequence: Sequence) -> None:
        """The sequence waits no longer, or is set aside, outside the order."""

    def key(self, sequence: Sequence) -> Key:
        """The rank of the sequence if it were scheduled now. No two sequences have the same key."""

    def preemptible_by(self, running: Sequence, rank: int) -> bool:
        """Whether a running sequence may be preempted for a waiting one of class `rank`."""

    def over_share(self, sequence: Sequence, num_slots: int) -> bool:
        """Whether the sequence's tenant has more than its share of `num_slots`, and other tenants may send requests."""

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence runs now. `num_tokens` of its prompt are computed for the first time."""

    def on_freed(self, sequence: Sequence) -> None:
        """The sequence runs no longer."""

    def largest_tenants(self, most: int) -> list[TenantShare]:
        """The `most` tenants that were served most, for metrics. Empty if the policy knows no tenants."""


class SequenceHeap:
    """Waiting sequences by key. Entries are removed when they come to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Sequence]] = []
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, key: Key, sequence: Sequence) -> None:
        self._num_live += 1
        heapq.heappush(self._heap, (key, sequence.ticket, sequence))

    def remove(self) -> None:
        """One of the sequences has another ticket now, or none."""
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


class OrderedPolicy:
    """Orders by arrival; with `by_priority`, the request's priority is the class. Implements `Policy`."""

    def __init__(self, by_priority: bool) -> None:
        self.has_classes = self._by_priority = by_priority
        self._queue = SequenceHeap()
        self.peek = self._queue.peek

    def push(self, sequence: Sequence) -> None:
        self._queue.push(self.key(sequence), sequence)

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove()

    def key(self, sequence: Sequence) -> Key:
        request = sequence.request
        return (request.frame.priority if self._by_priority else 0, request.arrival, sequence.index)

    def preemptible_by(self, running: Sequence, rank: int) -> bool:
        return running.key[0] > rank

    def over_share(self, sequence: Sequence, num_slots: int) -> bool:
        return False

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def on_freed(self, sequence: Sequence) -> None:
        pass

    def largest_tenants(self, most: int) -> list[TenantShare]:
        return []
