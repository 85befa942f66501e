"""Processes that compile Triton kernels, one kernel after the other each. Imports neither torch nor Triton.

They take seconds to import Triton, so a worker that has nothing in its cache starts them before it imports torch.
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

MOST_PROCESSES = 12  # more would only read the same modules again
LIST = "blockyard-kernels.txt"  # in the cache folder: a line for each kernel in it
MODULE = "blockyard.services.gpu_worker.compilation.compile_process"

OnCompiled = Callable[[str], None]  # takes the problem, nothing if there is none


def num_processes(cores: int) -> int:
    """Two threads of a core share it: the kernel that takes longest to compile is to have one of its own."""
    return max(min(cores // 2, MOST_PROCESSES), 1)


def is_new(folder: Path) -> bool:
    """Whether nothing was compiled into this cache folder by a worker."""
    return not (folder / LIST).is_file()


class CompileProcesses:
    """Takes kernels as lines, in order. Threads wait for the processes, one each."""

    def __init__(self, num: int) -> None:
        self.num = num
        self._jobs: SimpleQueue[tuple[str, OnCompiled] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """May be called again; `submit` does so."""
        while len(self._threads) < self.num:
            thread = threading.Thread(target=self._serve, name=f"compile-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def submit(self, line: str, done: OnCompiled) -> None:
        """`done` is called in another thread."""
        self.start()
        self._jobs.put((line, done))

    def close(self) -> None:
        """Ends the processes once they are done with what they compile now; what waits is dropped."""
        while not self._jobs.empty():
            self._jobs.get()
        for _ in self._threads:
            self._jobs.put(None)
        self._threads.clear()

    def _serve(self) -> None:
        """A process that ends takes its kernel with it, no more."""
        process = _start()
        while (job := self._jobs.get()) is not None:
            line, done = job
            if process.poll() is not None:
                _end(process)
                process = _start()
            began_s = time.perf_counter()
            problem = _ask(process, line)
            log.debug("%.2f s: %s", time.perf_counter() - began_s, line[:100])
            done(problem)
        _end(process)


def _start() -> "subprocess.Popen[str]":
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
    """Returns the problem, nothing if there is none."""
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
    with contextlib.suppress(BrokenPipeError):  # it ended by itself
        process.stdin.close()
    process.stdout.close()
    process.wait()
