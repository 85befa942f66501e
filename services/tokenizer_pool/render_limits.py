"""Bounds on what a chat template may cost: it is a program, and may come with a request."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blockyard.shared.errors import RequestError

AGAIN_S = 0.1  # should something swallow the first alarm


class _OutOfTime(BaseException):
    """Not an Exception: jinja2 catches those at places."""


class RenderLimits:
    """Time and memory for code that runs in the main thread.

    Time is CPU time of this process, taken by SIGPROF: a slow machine makes no template fail. Memory is address
    space on top of what the process has; it stops single huge strings, which no alarm can interrupt.
    """

    def __init__(self, cpu_s: float = 2.0, memory_bytes: int = 512 << 20) -> None:
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        self._armed = False
        signal.signal(signal.SIGPROF, self._alarm)

    @contextmanager
    def applied(self, field: str) -> Iterator[None]:
        """Raises RequestError naming `field` when the block takes too much."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = _address_space_bytes() + self._memory_bytes
        try:
            try:
                self._armed = True
                signal.setitimer(signal.ITIMER_PROF, self._cpu_s, AGAIN_S)
                resource.setrlimit(resource.RLIMIT_AS, (limit if soft < 0 else min(soft, limit), hard))
                yield
            finally:
                self._armed = False
                signal.setitimer(signal.ITIMER_PROF, 0)
                resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        except _OutOfTime:
            raise RequestError(f"the chat template took more than {self._cpu_s:g} s", field) from None
        except MemoryError:
            raise RequestError("the chat template needs too much memory", field) from None

    def _alarm(self, *_: object) -> None:
        if self._armed:
            raise _OutOfTime


def _address_space_bytes() -> int:
    pages = Path("/proc/self/statm").read_text("ascii").split()[0]
    return int(pages) * os.sysconf("SC_PAGESIZE")
