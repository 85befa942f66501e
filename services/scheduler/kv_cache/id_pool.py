"""A pool of ids in which released ids stay pending while a plan in flight may still use them."""

from collections import deque

from blockyard.services.scheduler.plan_pacer import PlanClock


class IdPool:
    """Ids 0 to n - 1. A released id is pending until every plan sent by then has its result.

    Each id is free, pending or taken; the caller returns each taken id exactly once.
    """

    def __init__(self, num_ids: int, plan_clock: PlanClock) -> None:
        self.num_ids = num_ids
        self.num_pending = 0
        self._plan_clock = plan_clock
        self._free = list(range(num_ids - 1, -1, -1))
        self._pending: deque[tuple[int, list[int]]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take_one(self) -> int | None:
        return self._free.pop() if self._free else None

    def take(self, count: int) -> list[int]:
        """The caller has checked `num_free`."""
        assert count <= len(self._free), f"{count} ids wanted, {len(self._free)} free"
        if not count:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def remove(self, ids: list[int]) -> None:
        """Takes these free ids out of the pool, until they are released."""
        gone = set(ids)
        self._free = [i for i in self._free if i not in gone]

    def release(self, ids: list[int]) -> None:
        """The pool keeps the list."""
        if self._plan_clock.last_sent == self._plan_clock.last_completed:
            self._free.extend(ids)
        else:
            self._pending.append((self._plan_clock.last_sent, ids))
            self.num_pending += len(ids)

    def free_pending(self) -> None:
        """To be called after each completed plan."""
        while self._pending and self._pending[0][0] <= self._plan_clock.last_completed:
            _, ids = self._pending.popleft()
            self.num_pending -= len(ids)
            self._free.extend(ids)
