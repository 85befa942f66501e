"""How long the GPUs of a server had no kernel, or the processes of its ranks on a CPU did not compute."""

import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from blockyard.services.bench.load.results import BenchError

SAMPLE_S = 0.2
TICKS_PER_S = 100  # of the times in /proc
QUERY = ["nvidia-smi", "--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits"]


class BusySample(NamedTuple):
    """The share of the time since the sample before in which one GPU, or process, was busy."""

    time_s: float  # of perf_counter
    place: int
    busy: float


Read = Callable[[], dict[int, float]]  # busy shares by place; empty: not known yet


class BusySampler:
    """Samples in a thread, while it is entered."""

    def __init__(self, read: Read, every_s: float = SAMPLE_S) -> None:
        self._read, self._every_s = read, every_s
        self._samples: list[BusySample] = []
        self._problem = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _run(self, over: threading.Event) -> None:
        while not over.wait(self._every_s):
            try:
                found = self._read()
            except (OSError, subprocess.SubprocessError, ValueError) as e:
                self._problem = f"{type(e).__name__}: {e}"
                return
            now = time.perf_counter()
            self._samples += [BusySample(now, place, min(busy, 1.0)) for place, busy in found.items()]

    def most_idle(self, begin_s: float, end_s: float) -> float:
        """Returns the idle share of the place that was idle most, between two times. Raises BenchError."""
        if self._problem:
            raise BenchError(f"busy times could not be read: {self._problem}")
        shares = defaultdict[int, list[float]](list)
        for sample in self._samples:
            if begin_s + self._every_s < sample.time_s <= end_s:  # its whole time is inside
                shares[sample.place].append(sample.busy)
        if not shares:
            raise BenchError(f"the load ran for {end_s - begin_s:.1f} s: too short for samples of busy times")
        return max(1.0 - sum(own) / len(own) for own in shares.values())


def of_gpus(num: int) -> Read:
    """Reads the driver's share of time with a kernel, of the first GPUs. A kernel that waits for a peer counts."""

    def read() -> dict[int, float]:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=5, check=True)
        pairs = [line.split(",") for line in done.stdout.splitlines() if line.strip()]
        return {int(index): float(percent) / 100 for index, percent in pairs if int(index) < num}

    return read


def of_processes(pids: Sequence[int]) -> Read:
    """Reads the CPU time of processes since the last call, over the time."""
    last: dict[int, tuple[float, float]] = {}  # by pid: time, and CPU time so far

    def read() -> dict[int, float]:
        found: dict[int, float] = {}
        for place, pid in enumerate(pids):
            now, spent = time.perf_counter(), _cpu_s(pid)
            if pid in last:
                before, spent_before = last[pid]
                found[place] = (spent - spent_before) / (now - before)
            last[pid] = now, spent
        return found

    return read


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
