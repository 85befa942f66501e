"""How many cores this process may use."""

import os
from pathlib import Path


def default_threads(replicas: int = 1) -> int:
    """All cores but one, divided by the replicas: the other services of the ring need one, and two compute threads on
    one core wait for each other.
    """
    return max(round((usable_cores() - 1) / replicas), 1)


def usable_cores(limit_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Cores of the machine, or of its container if that has fewer."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = limit_file.read_text("ascii").split()
        return min(cores, max(int(quota) // int(period), 1))
    except (OSError, ValueError):  # no such file, or "max 100000": no limit
        return cores
