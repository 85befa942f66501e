"""The report of a worker's start: phases, progress, notes, and the seconds that each phase took."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from blockyard.services.gpu_worker.interfaces import Report

READY = "ready"  # the last phase
FIRST = "setting up the device"
SHORT_S = 0.05  # a phase that took less is in no line


class StartReport:
    """Reports the phases of a start, each with all notes so far, and at the end a line with their times."""

    def __init__(self, report: Report, before_s: float = 0.0, clock: Callable[[], float] = time.perf_counter) -> None:
        """before_s: seconds that the process took before, for imports. clock: gives seconds."""
        self._report, self._clock = report, clock
        self._notes: list[str] = []
        self._seconds = {"imports": before_s, FIRST: 0.0}  # by phase, in order
        self._waited_s = 0.0
        self._phase, self._began_s = FIRST, clock()

    def phase(self, name: str, progress: float = 0.0, *more_notes: str) -> None:
        """progress: fraction of the phase. more_notes: for this phase alone."""
        if name != self._phase:
            now = self._clock()
            self._seconds[self._phase] += now - self._began_s
            self._phase, self._began_s = name, now
            if name == READY and READY not in self._seconds:
                self.note(self._describe())
            self._seconds.setdefault(name, 0.0)
        self._report(name, progress, [*self._notes, *more_notes])

    def note(self, *notes: str) -> None:
        """Adds lines to the following reports."""
        self._notes.extend(notes)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as waiting for other ranks, which is a part of the phase."""
        began_s = self._clock()
        yield
        self._waited_s += self._clock() - began_s

    def _describe(self) -> str:
        """For example 'start: 2.1 s imports, 0.4 s loading weights; 0.3 s of it waiting for other ranks'."""
        took = [f"{seconds:.1f} s {name}" for name, seconds in self._seconds.items() if seconds >= SHORT_S]
        waited = f"; {self._waited_s:.1f} s of it waiting for other ranks" if self._waited_s >= SHORT_S else ""
        return f"start: {', '.join(took) or f'less than {SHORT_S} s'}{waited}"


class Throttle:
    """Passes a fraction on only if it has grown by 0.01, because there are thousands of weights."""

    def __init__(self, progress: Callable[[float], None]) -> None:
        self._progress, self._last = progress, -1.0

    def __call__(self, fraction: float) -> None:
        if fraction - self._last >= 0.01:
            self._last = fraction
            self._progress(fraction)


def process_age_s() -> float:
    """Returns the seconds since this process was started (proc_pid_stat(5), field 22)."""
    after_name = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_name[19]) / os.sysconf("SC_CLK_TCK")
