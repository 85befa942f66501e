"""Workers that are taken from their batch for a while: to sleep, or to forget what their blocks hold.

Their groups are taken as lost, so that requests wait with the tokens that are known, and the workers are asked to
attach again: at once, or when they are woken up.
"""

from collections import Counter
from collections.abc import Callable

from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.queue.queue_bounds import QueueBounds
from blockyard.services.scheduler.workers.worker_groups import Group, Groups
from blockyard.shared.messages import Part, Sleep, Slept, Wake


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
        self.woken: set[Part] = set()  # what sleeping workers were given back
        self.expected: set[int] = set()  # workers that were asked to attach again
        self._scheduler = scheduler
        self._groups, self._bounds, self._outbox, self._clear = groups, bounds, outbox, clear
        self._asleep: dict[int, int] = {}  # workers, and the bytes that they said they freed
        self._due: Counter[int] = Counter()  # answers of each that are still to come

    @property
    def all_asleep(self) -> bool:
        """Workers have done all that they were told."""
        return not any(self._due[worker] for worker in self._asleep)

    @property
    def freed_bytes(self) -> int:
        return sum(self._asleep.values())

    def has(self, worker: int) -> bool:
        return worker in self._asleep

    def has_given(self, parts: list[Part]) -> bool:
        """Whether sleeping workers were told to take these back."""
        return bool(parts) and self.woken.issuperset(parts)

    def attached(self, group: Group) -> None:
        """A group is there. One that comes while all others sleep is put to sleep."""
        self.expected.discard(group.worker)
        if self.level:
            self._send(group)

    def slept(self, worker: int, frame: Slept) -> None:
        if worker in self._asleep:
            self._asleep[worker] = frame.freed_bytes
            self._due[worker] -= 1

    def gone(self, member: int) -> None:
        self._asleep.pop(member, None)
        self._due.pop(member, None)
        self.expected.discard(member)

    def sleep(self, level: int) -> None:
        """Deeper sleep stays."""
        if level <= self.level and not self.woken:
            return
        self.level, self._bounds.asleep = max(level, self.level), True
        self.woken.clear()
        for worker in self._asleep:
            self._tell(worker, Sleep(self._scheduler, self.level))
        for group in list(self._groups.attached.values()):
            self._send(group)

    def wake(self, now: float, parts: list[Part]) -> None:
        """Without `parts`, or once all were named, workers serve again."""
        if self.level and parts and not self.woken.issuperset(parts):
            self.woken.update(parts)
            for worker in self._asleep if len(self.woken) < len(Part) else ():
                self._tell(worker, Wake(self._scheduler, parts))
        if parts and len(self.woken) < len(Part):
            return
        self.level, self._bounds.asleep = 0, False
        self.woken.clear()
        asleep, self._asleep = self._asleep, {}
        self._due.clear()
        for worker in asleep:
            self._ask(worker, now)

    def renew(self, now: float) -> None:
        """Nothing that any group holds is found any more. What runs is computed again."""
        for group in list(self._groups.attached.values()):
            self._lose(group)
            self._ask(group.worker, now, forget=True)

    def _send(self, group: Group) -> None:
        self._lose(group)
        self._tell(group.worker, Sleep(self._scheduler, self.level))
        if self.woken:
            self._tell(group.worker, Wake(self._scheduler, sorted(self.woken)))

    def _tell(self, worker: int, frame: Sleep | Wake) -> None:
        """Answered with Slept."""
        self._asleep.setdefault(worker, 0)
        self._due[worker] += 1
        self._outbox.send(worker, frame)

    def _lose(self, group: Group) -> None:
        self._groups.detach(group.worker)
        self._clear(group, "is asked to begin anew")

    def _ask(self, worker: int, now: float, forget: bool = False) -> None:
        self.expected.add(worker)
        self._outbox.send(worker, self._groups.ask(worker, now, forget))
