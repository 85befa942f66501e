"""Looks at a run once a second: the generator's own CPU time, and a bar on a terminal."""

import asyncio
import sys
import time
from typing import Protocol

from blockyard.services.bench.load.client import LoadRun

PERIOD_S = 1.0


class LoadDisplay(Protocol):
    def show(self, load: LoadRun) -> None: ...

    def close(self) -> None: ...


class NoLoadDisplay:
    """Not a terminal: nothing until the report."""

    def show(self, load: LoadRun) -> None:
        pass

    def close(self) -> None:
        pass


def display(num: int) -> LoadDisplay:
    if not sys.stderr.isatty():
        return NoLoadDisplay()
    # rich takes 0.1 s to import
    from blockyard.services.bench.load.progress import LoadProgressBar  # noqa: PLC0415

    return LoadProgressBar(num)


class CpuMonitor:
    """A context around a run."""

    def __init__(self, load: LoadRun, shown: LoadDisplay) -> None:
        self.cpu_share = 0.0  # of a core, once the run is over
        self.peak_cpu_share = 0.0
        self._course, self._shown = load, shown

    async def __aenter__(self) -> "CpuMonitor":
        self._began = self._mark()
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        self.cpu_share = share(self._began, self._mark())
        self.peak_cpu_share = max(self.peak_cpu_share, self.cpu_share)
        self._shown.show(self._course)
        self._shown.close()

    async def _look(self) -> None:
        before = self._began
        while True:
            await asyncio.sleep(PERIOD_S)
            now = self._mark()
            self.peak_cpu_share = max(self.peak_cpu_share, share(before, now))
            before = now
            self._shown.show(self._course)

    def _mark(self) -> tuple[float, float]:
        now, ended_s = time.perf_counter(), self._course.ended_s  # what comes back is read after that
        return min(now, ended_s) if ended_s else now, self._course.cpu_s()


def share(before: tuple[float, float], now: tuple[float, float]) -> float:
    """CPU time by wall time between two marks."""
    return (now[1] - before[1]) / max(now[0] - before[0], 1e-9)
