"""Starts processes that compile Triton kernels and gives them kernels. Imports neither torch nor Triton.

A process takes seconds to import Triton, so a worker with an empty cache starts them before it imports torch.
"""

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

log = logging.getLogger(__name__)

MOST_PROCESSES = 12  # more processes gain nothing: each imports Triton first
LIST = "blockyard-kernels.txt"  # in the cache folder: a line for each kernel in it
MODULE = "blockyard.services.gpu_worker.compilation.compile_process"

OnCompiled = Callable[[str], None]  # takes the error, empty if it is compiled


def num_processes(cores: int, sharers: int = 1) -> int:
    """Half the cores: two hardware threads share one, and the slowest kernel should have its own.

    sharers: workers and ranks of this machine, which compile at the same time.
    """
    return max(min(cores // 2 // sharers, MOST_PROCESSES), 1)


def is_new(folder: Path) -> bool:
    """Whether no worker has compiled kernels into this cache folder."""
    return not (folder / LIST).is_file()


class CompileProcesses:
    """Owns the processes. Takes kernels as lines, in order; one thread waits for each process."""

    def __init__(self, num: int) -> None:
        self._num, self._num_submitted = num, 0
        self._jobs: SimpleQueue[tuple[str, OnCompiled] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def num(self) -> int:
        """Processes that are started."""
        return len(self._threads)

    def start(self, num: int | None = None) -> None:
        """Starts so many processes if they are not there yet, None: all. `submit` starts one for each kernel."""
        while self.num < (self._num if num is None else min(num, self._num)):
            thread = threading.Thread(target=self._serve, name=f"compile-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, line: str, done: OnCompiled) -> None:
        """`done` is called in another thread."""
        self._num_submitted += 1
        self.start(self._num_submitted)
        self._jobs.put((line, done))

    def close(self) -> None:
        """Ends each process after its current kernel; waiting kernels are dropped."""
        while not self._jobs.empty():
            self._jobs.get()
        for _ in self._threads:
            self._jobs.put(None)
        self._threads.clear()

    def _serve(self) -> None:
        """Restarts a process that has ended: only its current kernel is lost."""
        process = start_process()
        while (job := self._jobs.get()) is not None:
            line, done = job
            if process.poll() is not None:
                _end(process)
                process = start_process()
            began_s = time.perf_counter()
            problem = _ask(process, line)
            log.debug("%.2f s: %s", time.perf_counter() - began_s, line[:100])
            done(problem)
        _end(process)


def start_process() -> "subprocess.Popen[str]":
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )


def _ask(process: "subprocess.Popen[str]", line: str) -> str:
    """Returns the error, empty if there is none."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(f"{line}\n")
        answer = process.stdout.readline()
    except OSError as e:
        return f"the compiling process ended: {e}"
    return answer.strip() if answer else "the compiling process ended"


def _end(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already
        process.stdin.close()
    process.stdout.close()
    process.wait()
