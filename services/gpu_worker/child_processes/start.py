"""Starts and ends child processes of a worker."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

Child = tuple["subprocess.Popen[bytes]", socket.socket]  # with our end of its socket
ADAPTER_READER = ("-m", "blockyard.services.gpu_worker.lora.reader_process")
CLOSE_S = 5.0  # a process that has not ended by then is killed


def start_child(command: Sequence[str], descriptors: Sequence[int] = (), **environment: str) -> Child:
    """Starts a process to which no GPU is visible.

    command: arguments of the Python interpreter, behind which the process gets its socket, `descriptors`, and the
    process id of the worker.
    """
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry for entry in sys.path if entry)
    inherited = (theirs.fileno(), *descriptors)
    process = subprocess.Popen(
        [sys.executable, "-P", *command, *map(str, inherited), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", **environment},
        pass_fds=inherited,
    )
    theirs.close()
    return process, ours


def end_child(process: "subprocess.Popen[bytes]") -> None:
    """Waits for a process after its socket is closed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_S)
        return
    process.kill()
    process.wait()
