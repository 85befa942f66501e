"""Puts workers to sleep and wakes them, and resets their prefix caches.

For both, the worker's group is dropped as if it were lost, so that its requests wait with the tokens they have. The
worker is asked to attach again: after a reset at once, after sleep when it is woken up.
"""

from collections import Counter

from blockyard.services.scheduler.batch.worker_groups import WorkerGroup, WorkerGroups
from blockyard.services.scheduler.outbox import Outbox
from blockyard.services.scheduler.queue.queue_bounds import QueueBounds
from blockyard.services.scheduler.workers.workers import Workers
from blockyard.shared.messages import MemoryTag, Sleep, Slept, Wake


class WorkerSleep:
    def __init__(
        self,
        groups: WorkerGroups,
        bounds: QueueBounds,
        outbox: Outbox,
        workers: Workers,
    ) -> None:
        self.level = 0  # of sleep; 0: awake
        self.restored: set[MemoryTag] = set()  # memory that sleeping workers have back
        self.reattaching: set[int] = set()  # workers asked to attach again
        self._scheduler = groups.scheduler
        self._groups, self._bounds, self._outbox, self._workers = groups, bounds, outbox, workers
        self._asleep: dict[int, int] = {}  # freed bytes by worker
        self._num_unanswered: Counter[int] = Counter()  # controls without an answer by worker

    @property
    def all_asleep(self) -> bool:
        """Whether all sleeping workers have answered all controls."""
        return not any(self._num_unanswered[worker] for worker in self._asleep)

    @property
    def freed_bytes(self) -> int:
        return sum(self._asleep.values())

    def is_asleep(self, worker: int) -> bool:
        return worker in self._asleep

    def has_restored(self, parts: list[MemoryTag]) -> bool:
        """Whether sleeping workers were told to restore all of these."""
        return bool(parts) and self.restored.issuperset(parts)

    def on_attached(self, group: WorkerGroup) -> None:
        """Puts a newly attached group to sleep if the others sleep."""
        self.reattaching.discard(group.worker)
        if self.level:
            self._put_to_sleep(group)

    def on_slept(self, worker: int, frame: Slept) -> None:
        if worker in self._asleep:
            self._asleep[worker] = frame.freed_bytes
            self._num_unanswered[worker] -= 1

    def on_lost(self, member: int) -> None:
        self._asleep.pop(member, None)
        self._num_unanswered.pop(member, None)
        self.reattaching.discard(member)

    def sleep(self, level: int) -> None:
        """Puts all workers to sleep. A level below the current one changes nothing."""
        if level <= self.level and not self.restored:
            return
        self.level = max(level, self.level)
        self._bounds.is_asleep = True
        self.restored.clear()
        for worker in self._asleep:
            self._send_control(worker, Sleep(self._scheduler, self.level))
        for group in list(self._groups.attached.values()):
            self._put_to_sleep(group)

    def wake(self, now: float, parts: list[MemoryTag]) -> None:
        """Wakes up all workers. With `parts`, only that memory is restored, until all parts were named."""
        if self.level and parts and not self.restored.issuperset(parts):
            self.restored.update(parts)
            for worker in self._asleep if len(self.restored) < len(MemoryTag) else ():
                self._send_control(worker, Wake(self._scheduler, parts))
        if parts and len(self.restored) < len(MemoryTag):
            return
        self.level = 0
        self._bounds.is_asleep = False
        self.restored.clear()
        asleep, self._asleep = self._asleep, {}
        self._num_unanswered.clear()
        for worker in asleep:
            self._reattach(worker, now)

    def reset_prefix_cache(self, now: float) -> None:
        """Drops all cached blocks of all groups. Running sequences are computed again.

        The answer to an earlier Attach may name cached blocks, so a worker that owes one is asked again. A worker that
        sleeps, or whose link is lost, drops its blocks when it is attached.
        """
        self._groups.on_reset()
        for group in list(self._groups.attached.values()):
            self._detach(group)
            self._reattach(group.worker, now)
        for worker in [one for one, asked in self._groups.asked.items() if not asked.frame.forget]:
            self._reattach(worker, now)

    def _put_to_sleep(self, group: WorkerGroup) -> None:
        self._detach(group)
        self._send_control(group.worker, Sleep(self._scheduler, self.level))
        if self.restored:
            self._send_control(group.worker, Wake(self._scheduler, sorted(self.restored)))

    def _send_control(self, worker: int, frame: Sleep | Wake) -> None:
        self._asleep.setdefault(worker, 0)
        self._num_unanswered[worker] += 1
        self._outbox.send(worker, frame)

    def _detach(self, group: WorkerGroup) -> None:
        self._groups.detach(group.worker)
        self._workers.requeue(group, "is asked to begin anew")

    def _reattach(self, worker: int, now: float) -> None:
        self.reattaching.add(worker)
        self._outbox.send(worker, self._groups.attach_request(worker, now))
