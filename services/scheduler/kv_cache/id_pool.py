"""A pool of ids in which released ids stay pending while a plan in flight may still use them."""

from collections import deque

from blockyard.services.scheduler.plan_pacer import PlanClock


class IdPool:
    """Ids 0 to n - 1. A released id is pending until every plan sent by then has its result.

    Each id is free, pending or taken; the caller returns each taken id exactly once. Released ids are taken again
    first, the last one before the others. The rest begins in order with the lowest id that was never taken.
    """

    def __init__(self, num_ids: int, plan_clock: PlanClock) -> None:
        self.num_ids = num_ids
        self.num_pending = 0
        self._plan_clock = plan_clock
        self._first_unused = 0  # this id and all above it were never taken: a list of them would be large
        self._free: list[int] = []  # the others
        self._pending: deque[tuple[int, list[int]]] = deque()

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_ids - self._first_unused

    def free_ids(self) -> list[int]:
        """All of them; the last one is taken first."""
        return [*range(self.num_ids - 1, self._first_unused - 1, -1), *self._free]

    def take_one(self) -> int | None:
        if self._free:
            return self._free.pop()
        taken = self._first_unused
        if taken == self.num_ids:
            return None
        self._first_unused = taken + 1
        return taken

    def take(self, count: int) -> list[int]:
        """The caller has checked `num_free`."""
        num_free = len(self._free)
        num_unused = self.num_ids - self._first_unused
        assert count <= num_free + num_unused, f"{count} ids wanted, {num_free + num_unused} free"
        if not count:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        if count > num_free:
            first = self._first_unused
            self._first_unused = end = first + count - num_free
            taken += range(first, end)
        return taken

    def remove(self, ids: list[int]) -> None:
        """Takes these free ids out of the pool, until they are released."""
        if not ids:
            return
        gone = set(ids)
        self._free = [i for i in self.free_ids() if i not in gone]
        self._first_unused = self.num_ids

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
