"""Tells how a child process ended."""

import signal

# Nothing that a process does for a request raises these in it: an operator sends them, or the kernel without memory.
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
FROM_OUTSIDE |= {signal.SIGUSR1, signal.SIGUSR2}


def ended_from_outside(exit_code: int) -> bool:
    """Whether a signal from outside ended the process. exit_code: as `subprocess` has it, negative for a signal."""
    return -exit_code in FROM_OUTSIDE
