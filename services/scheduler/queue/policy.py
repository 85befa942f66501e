"""The interface of scheduling policies, the order by arrival or priority, and lines of batch files behind each of them.

Policies share the heap of waiting sequences.
"""

import heapq
from typing import Protocol

from blockyard.services.scheduler.sequences.requests import Key, Sequence
from blockyard.shared.messages import TenantShare

COMPACT_FROM = 64  # stale entries beyond the live ones
BATCH_CLASS = 1 << 61  # of lines of batch files: above the class of every online request
RECENT_S = 60.0  # after an online request, another one may come


class Policy(Protocol):
    """Orders the waiting sequences and ranks the running ones.

    The first number of a key is a class. Lower classes are scheduled first, and a waiting sequence may preempt running
    ones of higher classes. Within a class no running sequence is preempted for a waiting one.
    """

    @property
    def has_classes(self) -> bool:
        """False: all sequences that wait and run are of one class."""

    @property
    def turn_tokens(self) -> int | None:
        """Tokens of the texts of one request after which the next sequence is asked for anew; None: all that fit."""

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

    turn_tokens = None

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


class BatchLinesLast:
    """Lines of batch files wait behind all online requests, whatever the policy of these is. Implements `Policy`.

    Lines have the highest class, in the order of their arrival: they run in slots and blocks that no online request
    needs, and an online request may preempt them.
    """

    def __init__(self, online: Policy) -> None:
        self.online = online
        self._lines = SequenceHeap()
        self._num_lines = 0  # waiting in order, and running
        self._last_online_s, self._now = -RECENT_S, 0.0

    @property
    def has_classes(self) -> bool:
        return self._num_lines > 0 or self.online.has_classes

    @property
    def turn_tokens(self) -> int | None:
        return self.online.turn_tokens

    def push(self, sequence: Sequence) -> None:
        request = sequence.request
        self._now = max(self._now, request.arrival_s)
        if not request.is_batch_line:
            self._last_online_s = self._now
            self.online.push(sequence)
            return
        self._num_lines += 1
        self._lines.push(self.key(sequence), sequence)

    def peek(self) -> Sequence | None:
        return self.online.peek() or self._lines.peek()

    def remove(self, sequence: Sequence) -> None:
        if not sequence.request.is_batch_line:
            self.online.remove(sequence)
            return
        self._num_lines -= 1
        self._lines.remove()

    def key(self, sequence: Sequence) -> Key:
        request = sequence.request
        if not request.is_batch_line:
            return self.online.key(sequence)
        return (BATCH_CLASS, request.arrival, sequence.index)

    def preemptible_by(self, running: Sequence, rank: int) -> bool:
        if running.request.is_batch_line:
            return rank < BATCH_CLASS
        return rank < BATCH_CLASS and self.online.preemptible_by(running, rank)

    def over_share(self, sequence: Sequence, num_slots: int) -> bool:
        """Prompts of batch lines take little of a step while online requests come, which wait for its end."""
        if not sequence.request.is_batch_line:
            return self.online.over_share(sequence, num_slots)
        return self._last_online_s > self._now - RECENT_S

    def on_scheduled(self, sequence: Sequence, num_tokens: int) -> None:
        if sequence.request.is_batch_line:
            self._num_lines += 1
        else:
            self.online.on_scheduled(sequence, num_tokens)

    def on_freed(self, sequence: Sequence) -> None:
        if sequence.request.is_batch_line:
            self._num_lines -= 1
        else:
            self.online.on_freed(sequence)

    def largest_tenants(self, most: int) -> list[TenantShare]:
        return self.online.largest_tenants(most)
