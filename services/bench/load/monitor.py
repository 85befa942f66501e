"""Watches a load run: the generator's own CPU time, sampled each second, and a progress bar on a terminal."""

import asyncio
import sys
import time
from typing import TYPE_CHECKING

from blockyard.services.bench.load.client import LoadRun
from blockyard.shared.progress_bars import make_progress

if TYPE_CHECKING:
    from rich.console import Console

PERIOD_S = 1.0


class LoadProgressBar:
    """Draws only in `show`: a refresh thread of its own would delay the requests that are being timed."""

    def __init__(self, num: int, shown_on: "Console | None" = None) -> None:
        self._progress = make_progress(
            shown_on or sys.stderr, "{task.fields[state]}", bar_width=30, refreshes_per_s=None
        )
        self._task = self._progress.add_task("Requests", total=num, state="")
        self._progress.start()

    def show(self, load: LoadRun) -> None:
        failed = f", [red]{load.num_refused} failed" if load.num_refused else ""
        self._progress.update(self._task, completed=load.num_ended, state=f"{load.num_running} running{failed}")
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


def progress_bar(num: int) -> LoadProgressBar | None:
    """A bar for `num` requests if stderr is a terminal."""
    return LoadProgressBar(num) if sys.stderr.isatty() else None


class CpuMonitor:
    """Measures the generator's share of a core while the context is open; shows progress on `bar`."""

    def __init__(self, load: LoadRun, bar: LoadProgressBar | None = None) -> None:
        self.cpu_share = 0.0  # of a core; known once the run has ended
        self.peak_cpu_share = 0.0
        self._load, self._bar = load, bar

    async def __aenter__(self) -> "CpuMonitor":
        self._task = asyncio.create_task(self._sample_each_period())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        self.cpu_share = cpu_share(self._start(), self._sample())
        self.peak_cpu_share = max(self.peak_cpu_share, self.cpu_share)
        if self._bar is not None:
            self._bar.show(self._load)
            self._bar.close()

    async def _sample_each_period(self) -> None:
        before = None
        while True:
            await asyncio.sleep(PERIOD_S)
            if self._load.started_s:
                now = self._sample()
                self.peak_cpu_share = max(self.peak_cpu_share, cpu_share(before or self._start(), now))
                before = now
            if self._bar is not None:
                self._bar.show(self._load)

    def _start(self) -> tuple[float, float]:
        """The sample of the start. Until then client processes import modules, and `cpu_s` is that of this one."""
        return self._load.started_s, self._load.started_cpu_s

    def _sample(self) -> tuple[float, float]:
        """(wall time, CPU time). After the last response the wall clock stops: parsing is not part of the run."""
        now, ended_s = time.perf_counter(), self._load.ended_s
        return min(now, ended_s) if ended_s else now, self._load.cpu_s()


def cpu_share(before: tuple[float, float], now: tuple[float, float]) -> float:
    """CPU time divided by wall time between two samples."""
    return (now[1] - before[1]) / max(now[0] - before[0], 1e-9)
