"""Sets sequences aside until their adapter has a place in a group, so that others start before them."""

from collections.abc import Callable

from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Sequence


class AdapterWaits:
    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        # by adapter, each with its ticket: if the sequence has another one, it has left
        self.deferred: dict[int, list[tuple[int, Sequence]]] = {}
        self._since: dict[int, float] = {}  # by adapter
        self.released: dict[int, float] = {}  # since when those waited that no sequence has started with yet

    def defer(self, sequence: Sequence, adapter: int) -> None:
        """Passes over a sequence until one of its adapters may start."""
        if sequence.is_set_aside:  # in a group's queue
            self._waiting.requeue(sequence)
        self._waiting.set_aside(sequence)
        self.deferred.setdefault(adapter, []).append((sequence.ticket, sequence))
        if (since := self.released.pop(adapter, None)) is not None:
            self._since[adapter] = since  # others were faster

    def wanted(self, now: float) -> dict[int, float]:
        """The adapters of sequences that wait, in the order in which they began to, and since when."""
        for adapter in [one for one, waits in self.deferred.items() if not any(s.ticket == t for t, s in waits)]:
            del self.deferred[adapter]
        self._since = {adapter: self._since.get(adapter, now) for adapter in self.deferred}
        return self._since

    def release(self, can_start: Callable[[int], bool]) -> None:
        """Puts sequences back into the order of the queue once their adapter may start."""
        for adapter in [one for one in self.deferred if can_start(one)]:
            self._release_all(adapter)

    def on_started(self, adapter: int) -> None:
        """A sequence with this adapter has a place, or no request uses it any more."""
        self.released.pop(adapter, None)

    def sequences(self, adapter: int) -> list[Sequence]:
        return [sequence for ticket, sequence in self.deferred.get(adapter, ()) if sequence.ticket == ticket]

    def _release_all(self, adapter: int) -> None:
        if (since := self._since.pop(adapter, None)) is not None:
            self.released[adapter] = since
        for ticket, sequence in self.deferred.pop(adapter, ()):
            if sequence.ticket == ticket:
                self._waiting.requeue(sequence)
