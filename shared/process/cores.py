"""Counts the CPU cores that this process may use."""

import os
from pathlib import Path


def usable_cores(limit_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Returns the number of cores of the machine, or of the container if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = limit_file.read_text("ascii").split()
        return min(cores, max(int(quota) // int(period), 1))
    except (OSError, ValueError):  # no file, or "max 100000": the container has no limit
        return cores
