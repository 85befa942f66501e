"""Bounds the ranks of a host that load weights at a time: each holds a lock on one of some files meanwhile."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

RETRY_S = 0.05


@contextmanager
def loading_slot(folder: Path | None, most: int | None) -> Iterator[None]:
    """Waits until fewer than `most` processes load. folder: shared by them; None: this one loads alone.

    Linux frees the lock of a process that ends.
    """
    if folder is None or most is None:
        yield
        return
    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"loading-{i}.lock").open("w")) for i in range(most)]
        while not any(_is_locked(file.fileno()) for file in files):
            time.sleep(RETRY_S)
        yield


def _is_locked(descriptor: int) -> bool:
    """Locks a file, unless another process has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
