"""Integers given out and taken back, with a rest for those that a plan in flight may still touch."""

from collections import deque


class PlanClock:
    """Numbers of the last plan sent to a worker and of the last one whose result is in."""

    __slots__ = ("last_completed", "last_sent")

    def __init__(self) -> None:
        self.last_sent = 0
        self.last_completed = 0


class IdPool:
    """Ids 0 to n - 1. What is released rests until every plan sent by then has its result.

    free + resting + given out is always n; the caller keeps those given out and returns each exactly once.
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
        """The caller has looked at `num_free`."""
        assert count <= len(self._free), f"{count} ids wanted, {len(self._free)} free"
        if not count:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def remove(self, ids: list[int]) -> None:
        """These free ones are somebody else's from now on, until they are released here."""
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
        """To be called when `plan_clock.last_completed` has moved."""
        while self._pending and self._pending[0][0] <= self._plan_clock.last_completed:
            _, ids = self._pending.popleft()
            self.num_pending -= len(ids)
            self._free.extend(ids)
