"""Counts the CPU cores that this process may use."""

import os
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
