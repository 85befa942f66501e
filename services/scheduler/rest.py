"""Workers that are taken from their batch for a while: to sleep, or to forget what their blocks hold.

Their groups are taken as lost, so that requests wait with the tokens that are known, and the workers are asked to
attach again: at once, or when they are woken up.
"""

from collections.abc import Callable

from blockyard.services.scheduler.groups import Group, Groups
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.queue_bounds import QueueBounds
from blockyard.shared.messages import Sleep, Slept


class Rest:
    def __init__(
        self,
        scheduler: int,
        groups: Groups,
        bounds: QueueBounds,
        outbox: Outbox,
        clear: Callable[[Group, str], None],
    ) -> None:
        self.level = 0  # of sleep
        self.expected: set[int] = set()  # workers that were asked to attach again
        self._scheduler = scheduler
        self._groups, self._bounds, self._outbox, self._clear = groups, bounds, outbox, clear
        self._asleep: dict[int, int | None] = {}  # workers, and the bytes that they freed once they have said so

    @property
    def all_asleep(self) -> bool:
        """Those that were sent to sleep have said that they do."""
        return all(freed is not None for freed in self._asleep.values())

    @property
    def freed_bytes(self) -> int:
        return sum(freed or 0 for freed in self._asleep.values())

    def has(self, worker: int) -> bool:
        return worker in self._asleep

    def attached(self, group: Group) -> None:
        """A group is there. One that comes while all others sleep is put to sleep."""
        self.expected.discard(group.worker)
        if self.level:
            self._send(group)

    def slept(self, worker: int, frame: Slept) -> None:
        if worker in self._asleep and frame.level >= self.level:
            self._asleep[worker] = frame.freed_bytes

    def gone(self, member: int) -> None:
        self._asleep.pop(member, None)
        self.expected.discard(member)

    def sleep(self, level: int) -> None:
        """Deeper sleep stays."""
        if level <= self.level:
            return
        self.level, self._bounds.asleep = level, True
        for worker in self._asleep:
            self._asleep[worker] = None
            self._outbox.send(worker, Sleep(self._scheduler, level))
        for group in list(self._groups.attached.values()):
            self._send(group)

    def wake(self, now: float) -> None:
        self.level, self._bounds.asleep = 0, False
        asleep, self._asleep = self._asleep, {}
        for worker in asleep:
            self._ask(worker, now)

    def renew(self, now: float) -> None:
        """Nothing that any group holds is found any more. What runs is computed again."""
        for group in list(self._groups.attached.values()):
            self._lose(group)
            self._ask(group.worker, now, forget=True)

    def _send(self, group: Group) -> None:
        self._lose(group)
        self._asleep[group.worker] = None
        self._outbox.send(group.worker, Sleep(self._scheduler, self.level))

    def _lose(self, group: Group) -> None:
        self._groups.detach(group.worker)
        self._clear(group, "is asked to begin anew")

    def _ask(self, worker: int, now: float, forget: bool = False) -> None:
        self.expected.add(worker)
        self._outbox.send(worker, self._groups.ask(worker, now, forget))
