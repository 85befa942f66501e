"""How many cores this process may use."""

import os
from pathlib import Path


def default_threads(replicas: int = 1) -> int:
    """Cores minus one, shared by all replicas: the rest of the ring needs one.

    Two threads on one core wait for each other.
    """
    return max(round((usable_cores() - 1) / replicas), 1)


def usable_cores(limit_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The machine's, or what its container may use of them."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = limit_file.read_text("ascii").split()
        return min(cores, max(int(quota) // int(period), 1))
    except (OSError, ValueError):  # no such file, or "max 100000": no limit
        return cores
