"""Bounds on what a chat template may cost: it is a program, and may come with a request."""

import os
import resource
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

from blockyard.shared.errors import RequestError

AGAIN_S = 0.1  # a destructor may swallow an alarm

T = TypeVar("T")


class _OutOfTime(BaseException):
    """Not an Exception: jinja2 catches those at places."""


class RenderLimits:
    """Time and memory for code that runs in the main thread.

    Time is CPU time of this process, taken by SIGPROF: a slow machine makes no template fail. Memory is address
    space on top of what the process has; it stops single huge strings, which no alarm can interrupt.
    """

    def __init__(self, cpu_s: float = 2.0, memory_bytes: int = 256 << 20) -> None:
        self._cpu_s = cpu_s
        self._memory_bytes = memory_bytes
        signal.signal(signal.SIGPROF, _alarm)

    def run(self, field: str, work: Callable[[], T]) -> T:
        """What `work` returns. Raises RequestError naming `field` when it takes too much."""
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = _address_space_bytes() + self._memory_bytes
        try:
            resource.setrlimit(resource.RLIMIT_AS, (limit if soft < 0 else min(soft, limit), hard))
            signal.setitimer(signal.ITIMER_PROF, self._cpu_s, AGAIN_S)
            return _interruptible(work)
        except _OutOfTime as e:
            why = f"takes more than {self._cpu_s:g} s"
            traceback.clear_frames(e.__traceback__)  # they hold what it had made so far
        except MemoryError as e:
            why = "needs too much memory"
            traceback.clear_frames(e.__traceback__)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        raise RequestError(f"the chat template {why}", field)


def _interruptible(work: Callable[[], T]) -> T:
    return work()


def _alarm(_: int, frame: FrameType | None) -> None:
    """Raises only below `_interruptible`, so never while limits are set up or taken back."""
    while frame is not None:
        if frame.f_code is _interruptible.__code__:
            raise _OutOfTime
        frame = frame.f_back


def _address_space_bytes() -> int:
    pages = Path("/proc/self/statm").read_text("ascii").split()[0]
    return int(pages) * os.sysconf("SC_PAGESIZE")
