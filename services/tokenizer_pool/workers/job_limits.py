"""Limits on CPU time and memory of one job of a text worker. The kernel enforces them, also for code in C."""

import math
import os
import resource
import signal
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import msgspec

from blockyard.shared.errors import RequestError

MIB = 1 << 20
NUM_WORKERS = 2  # of a fork server
# Each part of a job has its own timer. Its signal ends the process and tells which part took too long.
RENDERING, ENCODING = signal.SIGPROF, signal.SIGVTALRM
_TIMERS = {RENDERING: signal.ITIMER_PROF, ENCODING: signal.ITIMER_VIRTUAL}


class JobLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one job; two of them grow with the model's context length."""

    render_cpu_s: float = 2.0
    encode_cpu_s: float = 2.0
    encode_cpu_us_per_token: float = 20.0  # ordinary text takes 1 to 2
    memory_bytes: int = 256 * MIB
    memory_bytes_per_token: int = 2048  # ordinary text takes about 500
    check_cpu_s: float = 2.0  # of one grammar
    quick_cpu_s: float = 0.25  # of each part of a quick job, if the limits above are larger
    silence_s: float = 20.0  # wall-clock time: a stopped process uses no CPU time
    growth_bytes: int = 128 * MIB  # a worker is replaced after a job that raised its peak by more

    def encoding_s(self, max_model_len: int) -> float:
        return self.encode_cpu_s + self.encode_cpu_us_per_token * max_model_len / 1e6

    def memory(self, max_model_len: int) -> int:
        return self.memory_bytes + self.memory_bytes_per_token * max_model_len


class Phases(Protocol):
    """Wraps the two parts of a job. Too much memory in a part raises RequestError naming `field`."""

    def rendering(self, field: str) -> AbstractContextManager[None]: ...

    def encoding(self, field: str) -> AbstractContextManager[None]: ...


class Unlimited:
    """Phases without limits."""

    def rendering(self, field: str) -> AbstractContextManager[None]:
        return nullcontext()

    def encoding(self, field: str) -> AbstractContextManager[None]:
        return nullcontext()


class ProcessLimits:
    """Phases that limit this process. Too much CPU time in a part ends the process by the part's signal."""

    def __init__(self, limits: JobLimits) -> None:
        self._limits = limits
        self._max_model_len: int | None = None
        self._most_cpu_s = math.inf  # of a part of the current job
        self._data_bytes = _memory_bytes(5)
        self._peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in _TIMERS:
            signal.signal(number, signal.SIG_DFL)

    def begin(self, max_model_len: int, quick: bool) -> None:
        """To be called before each job. Uses RLIMIT_DATA instead of RLIMIT_AS, so that mapped files do not count."""
        self._most_cpu_s = self._limits.quick_cpu_s if quick else math.inf
        if max_model_len != self._max_model_len:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            soft = self._data_bytes + self._limits.memory(max_model_len)
            resource.setrlimit(resource.RLIMIT_DATA, (soft if hard < 0 else min(soft, hard), hard))
            self._max_model_len = max_model_len

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """Loads what later jobs use: it counts as none of their memory."""
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        try:
            yield
        finally:
            self._data_bytes, self._max_model_len = _memory_bytes(5), None
            self._peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def rendering(self, field: str) -> AbstractContextManager[None]:
        return self._phase(RENDERING, self._limits.render_cpu_s, "the chat template", field)

    def encoding(self, field: str) -> AbstractContextManager[None]:
        return self._phase(ENCODING, self._limits.encoding_s(self._max_model_len or 0), "the text", field)

    def checking(self) -> AbstractContextManager[None]:
        return self._phase(RENDERING, self._limits.check_cpu_s, "the grammar", "grammar")

    def has_grown(self) -> bool:
        """True if the last jobs took so much memory that this process should be replaced."""
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return (peak_kib - self._peak_kib) * 1024 > self._limits.growth_bytes

    @contextmanager
    def _phase(self, number: signal.Signals, cpu_s: float, what: str, field: str) -> Iterator[None]:
        signal.setitimer(_TIMERS[number], min(cpu_s, self._most_cpu_s))
        try:
            yield
        except MemoryError as e:
            traceback.clear_frames(e.__traceback__)  # frees partial results that the frames hold
            raise RequestError(f"{what} needs too much memory", field) from None
        finally:
            signal.setitimer(_TIMERS[number], 0)


def resident_bytes() -> int:
    return _memory_bytes(1)


def _memory_bytes(field: int) -> int:
    pages = Path("/proc/self/statm").read_text("ascii").split()[field]
    return int(pages) * os.sysconf("SC_PAGESIZE")
