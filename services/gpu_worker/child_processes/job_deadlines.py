"""Time limits of the jobs of one child process, which tells when it begins each."""

from collections.abc import Callable

from blockyard.shared.process.awake_clock import AwakeClock

LONGEST_S = 1.0  # between two calls: of a longer pause the worker was stopped, and maybe the process, too


class JobDeadlines:
    """Counts from the beginning of a job, because the process may have others before it. To be polled while it has
    jobs."""

    def __init__(self, silence_s: float, clock: Callable[[], float] | None = None) -> None:
        """silence_s: after so long without a word, a process that has jobs and has begun none hangs."""
        self._silence_s, self._now = silence_s, clock or AwakeClock(LONGEST_S).now
        self._heard_s = self._now()
        self._began_s: dict[int, float] = {}  # by job
        self._due_s: dict[int, float] = {}

    @property
    def has_begun(self) -> bool:
        return bool(self._due_s)

    @property
    def last_begun(self) -> int | None:
        return next(reversed(self._due_s), None)

    def hear(self) -> None:
        """The process says something, or gets its first job."""
        self._heard_s = self._now()

    def begin(self, job: int, most_s: float) -> None:
        """The job is to end within `most_s` of its beginning. Called again for a job, it changes that time alone."""
        self._due_s[job] = self._began_s.setdefault(job, self._now()) + most_s

    def end(self, job: int) -> float:
        """Returns for how many seconds the job ran."""
        self._due_s.pop(job, None)
        now = self._now()
        return now - self._began_s.pop(job, now)

    def overdue(self) -> list[int]:
        now = self._now() if self._due_s else 0.0
        return [job for job, due_s in self._due_s.items() if now >= due_s]

    def is_silent(self) -> bool:
        """Whether the process hangs, if it has jobs."""
        return not self._due_s and self._now() - self._heard_s >= self._silence_s
