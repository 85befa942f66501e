"""WorkerGroups whose next plan may be made, but leaves later."""

import heapq
import math

from blockyard.services.scheduler.workers.worker_groups import WorkerGroup

SLACK_S = 0.001  # a plan may leave so much before it is due: no timer is more exact


class WakeupTimers:
    def __init__(self) -> None:
        self._due: list[tuple[float, int]] = []  # with the worker
        self._set: dict[int, float] = {}  # the alarm that counts, by worker

    def may_send(self, group: WorkerGroup, now: float) -> bool:
        """Whether it is time for a group's next plan. If it is too early an alarm is set."""
        next_send_s = group.pacer.next_send_s - SLACK_S
        if next_send_s <= now:
            return True
        if next_send_s < self._set.get(group.worker, math.inf):
            self._set[group.worker] = next_send_s
            heapq.heappush(self._due, (next_send_s, group.worker))
        return False

    def next(self) -> float | None:
        """When the next one goes off."""
        return self._due[0][0] if self._due else None

    def take(self, now: float) -> list[int]:
        """Workers whose alarm has gone off."""
        workers = []
        while self._due and self._due[0][0] <= now:
            next_send_s, worker = heapq.heappop(self._due)
            if self._set.get(worker) == next_send_s:
                del self._set[worker]
                workers.append(worker)
        return workers
