"""Assigns each job to the live member with the fewest of our jobs of its kind; the other jobs wait here.

Jobs of other kinds, and of other tenants, do not wait for each other here: each has a queue of its own, and its own
number of jobs at a member. Members run the jobs of tenants in turns, and quick ones before long ones.

A job may have caused the loss of its member. Most lost members were killed or disconnected, so their jobs go to other
members; a job that was at MAX_LOST lost members fails.
"""

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

F = TypeVar("F")

# Jobs of one kind at one member: enough to keep it busy, few enough that short jobs do not queue behind long ones.
MAX_WAITING = 2
MANY_WAITING = 16  # for a client with jobs that may all wait for each other: members and client wake up less often
MAX_LOST = 5  # lost members after which a job fails; what can end a process runs in one of its workers


class JobKind(NamedTuple):
    """Kinds of jobs; jobs of one kind wait for each other."""

    model: str
    tenant: str = ""
    is_check: bool = False  # of a grammar
    is_quick: bool = False
    is_brief: bool = False  # of the texts of pooling models


@dataclass(slots=True)
class _Job(Generic[F]):
    kind: JobKind
    frame: F | None  # None: forgotten


class _Member(Generic[F]):
    def __init__(self, model: str) -> None:
        self.model = model  # "" serves any
        self.jobs: dict[str, _Job[F]] = {}  # unanswered
        self.num_jobs: Counter[JobKind] = Counter()

    def put(self, name: str, job: _Job[F]) -> None:
        self.jobs[name] = job
        self.num_jobs[job.kind] += 1

    def pop(self, name: str) -> None:
        if (job := self.jobs.pop(name, None)) is not None:
            self.num_jobs -= Counter([job.kind])  # drops zeros


class JobPool(Generic[F]):
    """No sockets: methods return the (member, frame) pairs to send now."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._members: dict[int, _Member[F]] = {}
        self._queues: dict[JobKind, OrderedDict[str, F]] = {}  # job -> frame
        self._lost: dict[str, int] = {}  # open job -> number of members lost with it

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def serves(self, model: str) -> bool:
        return any(m.model in ("", model) for m in self._members.values())

    def waits(self, job: str) -> bool:
        """Whether the job is here, and not at a member."""
        return any(job in queue for queue in self._queues.values())

    def join(self, member: int, model: str) -> list[tuple[int, F]]:
        if member not in self._members:
            self._members[member] = _Member(model)
        return self._hand_out()

    def gone(self, member: int) -> tuple[list[tuple[int, F]], list[str]]:
        """Returns its unanswered jobs to the front of the queue, in order. Also returns the failed jobs."""
        lost = self._members.pop(member, None)
        given_up = []
        for job, kept in reversed(lost.jobs.items() if lost else ()):
            if kept.frame is None:
                continue
            self._lost[job] = self._lost.get(job, 0) + 1
            if self._lost[job] >= MAX_LOST:
                del self._lost[job]
                given_up.append(job)
                continue
            queue = self._queues.setdefault(kept.kind, OrderedDict())
            queue[job] = kept.frame
            queue.move_to_end(job, last=False)
        return self._hand_out(), given_up[::-1]

    def submit(self, job: str, kind: JobKind, frame: F) -> list[tuple[int, F]]:
        self._queues.setdefault(kind, OrderedDict())[job] = frame
        return self._hand_out()

    def answered(self, member: int, job: str) -> list[tuple[int, F]]:
        self._lost.pop(job, None)
        if member in self._members:
            self._members[member].pop(job)
        return self._hand_out()

    def forget(self, job: str) -> None:
        """Drops a job. If a member has it, it counts there until answered."""
        self._lost.pop(job, None)
        for queue in self._queues.values():
            queue.pop(job, None)
        for member in self._members.values():
            if job in member.jobs:
                member.jobs[job].frame = None

    def _hand_out(self) -> list[tuple[int, F]]:
        out = []
        for kind, queue in list(self._queues.items()):
            while queue and (chosen := self._least_loaded(kind)):
                incarnation, member = chosen
                job, frame = queue.popitem(last=False)
                member.put(job, _Job(kind, frame))
                out.append((incarnation, frame))
            if not queue:
                del self._queues[kind]
        return out

    def _least_loaded(self, kind: JobKind) -> tuple[int, _Member[F]] | None:
        free = [
            (incarnation, member)
            for incarnation, member in self._members.items()
            if member.model in ("", kind.model) and member.num_jobs[kind] < self._max_waiting
        ]
        return min(free, key=lambda pair: len(pair[1].jobs)) if free else None
