"""Counts the threads that this process may use."""

import sys

from blockyard.shared.process.cores import usable_cores


def default_threads(replicas: int = 1) -> int:
    """Returns the number of compute threads: all cores but one, divided by the replicas.

    The other services need one core, because two threads that share a core slow each other down.
    """
    return max(round((usable_cores() - 1) / replicas), 1)


def compile_threads(most: int) -> int:
    """Returns how many threads may compile Triton kernels at the same time: `most`, or 1 before Python 3.11.8.

    Triton calls `ast.parse`, which raises SystemError there when two threads are in it (python/cpython#106905).
    """
    return most if sys.version_info >= (3, 11, 8) else 1
