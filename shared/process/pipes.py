"""Output into a pipe that its reader closed, as in `blockyard flags | head`."""

import os
import signal
import sys
from collections.abc import Callable
from typing import TextIO


def exit_code_of(run: Callable[[], int]) -> int:
    """Returns the exit code of `run`, or that of a program killed by SIGPIPE if stdout was closed."""
    try:
        try:
            code = run()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    return code


def discard(out: TextIO) -> None:
    """Redirects `out` to /dev/null, so that flushing its buffer at exit raises nothing."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, out.fileno())
    os.close(nowhere)
