"""The order of waiting jobs: tenants in turns, and quick jobs before long ones. Knows nothing of processes."""

from collections import OrderedDict, deque
from typing import Generic, TypeVar

J = TypeVar("J")

QUICK_TURNS = 8  # quick jobs in a row while a long one could run


class TurnQueue(Generic[J]):
    """Jobs by key: a job of each key in turn, and the jobs of one key in order of arrival."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[J]] = OrderedDict()  # the first key is next

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __len__(self) -> int:
        return sum(map(len, self._jobs.values()))

    def push(self, key: str, job: J) -> None:
        self._jobs.setdefault(key, deque()).append(job)

    def put_back(self, key: str, job: J) -> None:
        """Makes a job that was taken the next one again."""
        self._jobs.setdefault(key, deque()).appendleft(job)
        self._jobs.move_to_end(key, last=False)

    def take(self) -> J:
        key, jobs = next(iter(self._jobs.items()))
        job = jobs.popleft()
        if jobs:
            self._jobs.move_to_end(key)
        else:
            del self._jobs[key]
        return job


class JobTurns(Generic[J]):
    """Two queues, of quick and of long jobs. Neither starves: of QUICK_TURNS + 1 jobs one may be long."""

    def __init__(self) -> None:
        self._quick: TurnQueue[J] = TurnQueue()
        self._long: TurnQueue[J] = TurnQueue()
        self._taken = 0  # quick jobs since the last long one, while one could run

    def __len__(self) -> int:
        return len(self._quick) + len(self._long)

    def push(self, key: str, job: J, quick: bool) -> None:
        self._of(quick).push(key, job)

    def put_back(self, key: str, job: J, quick: bool) -> None:
        """Makes a job that was taken the next one of its kind again."""
        self._of(quick).put_back(key, job)

    def take(self, may_be_long: bool) -> J | None:
        """Removes and returns the next job; None if there is none, or only long ones and `may_be_long` is False."""
        may_be_long = may_be_long and bool(self._long)
        if self._quick and not (may_be_long and self._taken >= QUICK_TURNS):
            self._taken = self._taken + 1 if may_be_long else 0
            return self._quick.take()
        if not may_be_long:
            return None
        self._taken = 0
        return self._long.take()

    def _of(self, quick: bool) -> TurnQueue[J]:
        return self._quick if quick else self._long
