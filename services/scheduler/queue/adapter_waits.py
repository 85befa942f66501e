"""Sets sequences aside until a group has their adapters, so that others start before them."""

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from blockyard.services.scheduler.queue.waiting_queue import WaitingQueue
from blockyard.services.scheduler.sequences.requests import Sequence

Adapters = tuple[int, ...]  # of a request


class AdapterGroup(Protocol):
    """The part of `WorkerGroup` that is asked for adapters."""

    def can_start(self, adapter: int) -> bool: ...


def first_lacking(adapters: Adapters, groups: Iterable[AdapterGroup]) -> int | None:
    """The adapter that a sequence waits for: the first that no group has beside those before it. None: a group has all.

    A prompt adapter comes before a LoRA adapter: groups load it before it is waited for, and keep it. A LoRA adapter is
    loaded by all groups while it is waited for, so that one of those with the prompt adapter will have both.
    """
    for adapter in adapters:
        groups = [group for group in groups if group.can_start(adapter)]
        if not groups:
            return adapter
    return None


class Wait(NamedTuple):
    """What a sequence waits for."""

    adapter: int
    beside: Adapters  # all of its request


class AdapterWaits:
    def __init__(self, waiting: WaitingQueue) -> None:
        self._waiting = waiting
        # each sequence with its ticket: if it has another one, it has left
        self.deferred: dict[Wait, list[tuple[int, Sequence]]] = {}
        self._since: dict[int, float] = {}  # by adapter
        self.released: dict[int, float] = {}  # since when those waited that no sequence has started with yet

    def defer(self, sequence: Sequence, adapter: int) -> None:
        """Passes over a sequence until an adapter that it lacks may start."""
        if sequence.is_set_aside:  # in a group's queue
            self._waiting.requeue(sequence)
        self._waiting.set_aside(sequence)
        wait = Wait(adapter, sequence.request.adapters)
        self.deferred.setdefault(wait, []).append((sequence.ticket, sequence))
        if (since := self.released.pop(adapter, None)) is not None:
            self._since[adapter] = since  # others were faster

    def wanted(self, now: float) -> dict[int, float]:
        """The adapters that sequences wait for, in the order in which they began to, and since when."""
        for wait in [one for one, waits in self.deferred.items() if not any(s.ticket == t for t, s in waits)]:
            del self.deferred[wait]
        self._since = {wait.adapter: self._since.get(wait.adapter, now) for wait in self.deferred}
        return self._since

    def release(self, lacking: Callable[[Adapters], int | None]) -> None:
        """Puts sequences back into the order of the queue once they lack another adapter, or none."""
        for wait in [one for one in self.deferred if lacking(one.beside) != one.adapter]:
            for ticket, sequence in self.deferred.pop(wait):
                if sequence.ticket == ticket:
                    self._waiting.requeue(sequence)
            if (since := self._since.get(wait.adapter)) is not None:
                self.released[wait.adapter] = since

    def on_started(self, adapter: int) -> None:
        """A sequence with this adapter has a place, or no request uses it any more."""
        self.released.pop(adapter, None)

    def sequences(self, wait: Wait) -> list[Sequence]:
        return [sequence for ticket, sequence in self.deferred.get(wait, ()) if sequence.ticket == ticket]
