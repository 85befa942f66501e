"""Runs a program for a limited time, and ends all that it has started."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


def run_limited(
    command: Sequence[str],
    limit_s: float,
    *,
    env: Mapping[str, str],
    stdout: IO[Any],
    stderr: IO[Any],
    cwd: Path | None = None,
) -> int | None:
    """Returns the exit code; None: it took longer. What is left of its process group is killed in each case."""
    process = subprocess.Popen(command, cwd=cwd, env=env, stdout=stdout, stderr=stderr, start_new_session=True)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
