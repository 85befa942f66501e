"""Counts the CPU cores and the threads that this process may use."""

import os
import sys
from pathlib import Path


def default_threads(replicas: int = 1) -> int:
    """Returns the number of compute threads: all cores but one, divided by the replicas.

    The other services need one core, because two threads that share a core slow each other down.
    """
    return max(round((usable_cores() - 1) / replicas), 1)


def usable_cores(limit_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the number of cores of the machine, or of the container if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = limit_file.read_text("ascii").split()
        return min(cores, max(int(quota) // int(period), 1))
    except (OSError, ValueError):  # no file, or "max 100000": the container has no limit
        return cores


def compile_threads(most: int) -> int:
    """Returns how many threads may compile Triton kernels at the same time: `most`, or 1 before Python 3.11.8.

    Triton calls `ast.parse`, which raises SystemError there when two threads are in it (python/cpython#106905).
    """
    return most if sys.version_info >= (3, 11, 8) else 1
