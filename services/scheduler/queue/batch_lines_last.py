"""Puts the lines of batch files behind all online requests, whatever the policy of those is.

Batch lines have the highest class, in the order of their arrival. They run in slots and blocks that no online request
needs, and an online request may preempt them.
"""

from blockyard.services.scheduler.queue.policy import Policy, SequenceHeap
from blockyard.services.scheduler.sequences.requests import Key, Sequence
from blockyard.shared.messages import TenantShare

BATCH_CLASS = 1 << 61  # above the class of every online request
RECENT_S = 60.0  # after an online request, another one may come


class BatchLinesLast:
    """Implements `Policy`, with another policy for the online requests."""

    def __init__(self, online: Policy) -> None:
        self.online = online
        self._lines = SequenceHeap()
        self._num_lines = 0  # waiting in order, and running
        self._last_online_s, self._now = -RECENT_S, 0.0

    @property
    def has_classes(self) -> bool:
        return self._num_lines > 0 or self.online.has_classes

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
