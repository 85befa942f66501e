"""Waiting sequences whose adapter has no place in a group yet: they are set aside, so that others start before them."""

from blockyard.services.scheduler.adapters.group_adapters import GroupAdapters
from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Sequence


class AdapterWaits:
    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        # by adapter, each with its ticket: if the sequence has another one, it has left
        self.deferred: dict[int, list[tuple[int, Sequence]]] = {}
        self._since: dict[int, float] = {}  # by adapter

    def defer(self, sequence: Sequence) -> None:
        """Passes over a sequence until its adapter may start."""
        assert sequence.request.adapter is not None
        if sequence.is_set_aside:  # in a group's queue
            self._waiting.requeue(sequence)
        self._waiting.set_aside(sequence)
        self.deferred.setdefault(sequence.request.adapter, []).append((sequence.ticket, sequence))

    def wanted(self, now: float) -> dict[int, float]:
        """The adapters of sequences that wait, in the order in which they began to, and since when."""
        for adapter in [one for one, waits in self.deferred.items() if not any(s.ticket == t for t, s in waits)]:
            del self.deferred[adapter]
        self._since = {adapter: self._since.get(adapter, now) for adapter in self.deferred}
        return self._since

    def release(self, adapters: GroupAdapters) -> None:
        """Puts sequences back into the order of the queue whose adapter may start in this group."""
        for adapter in [one for one in self.deferred if adapters.can_start(one)]:
            self.release_all(adapter)

    def sequences(self, adapter: int) -> list[Sequence]:
        return [sequence for ticket, sequence in self.deferred.get(adapter, ()) if sequence.ticket == ticket]

    def release_all(self, adapter: int) -> None:
        self._since.pop(adapter, None)
        for ticket, sequence in self.deferred.pop(adapter, ()):
            if sequence.ticket == ticket:
                self._waiting.requeue(sequence)
