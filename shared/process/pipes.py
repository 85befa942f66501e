"""Output into a pipe that has no reader any more, as in `blockyard flags | head`."""

import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO


def to_its_end(run: Callable[[], int]) -> int:
    """The exit code of `run`, or that of a program which SIGPIPE ends if stdout has no reader."""
    try:
        try:
            code = run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        leave(sys.stdout)
        return 128 + signal.SIGPIPE
    return code


def leave(out: TextIO) -> None:
    """From here on `out` leads nowhere: what is still in its buffer raises nothing at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, out.fileno())
    os.close(nowhere)
