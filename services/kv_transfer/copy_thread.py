"""Runs copies of blocks beside the thread of the worker's steps."""

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

Job = Callable[[], None]


class CopyThread:
    """One thread that runs jobs in order. A job must spend its time in calls that release the GIL.

    Only the thread that owns this object calls its methods.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Job] | None] = queue.SimpleQueue()
        self._done: deque[Job] = deque()
        self._num_open = 0
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable when `poll` has something to do
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        """Runs `job` on the thread, then one of `done` and `failed` inside of a later `poll`."""
        outcome: list[T | Exception] = []

        def run() -> None:
            try:
                outcome.append(job())
            except Exception as e:  # noqa: BLE001 - the caller gets it
                outcome.append(e)

        def report() -> None:
            result = outcome[0]
            if isinstance(result, Exception):
                failed(result)
            else:
                done(result)

        self._num_open += 1
        self._jobs.put((run, report))

    def poll(self) -> None:
        """Reports the jobs that are complete. Does not wait."""
        if not self._done:
            return
        with contextlib.suppress(BlockingIOError):  # a write that is about to come: the next poll finds nothing to do
            os.eventfd_read(self.descriptor)
        while self._done:
            self._num_open -= 1
            self._done.popleft()()

    def drain(self) -> None:
        """Waits for all jobs and reports them. Reports may submit more."""
        while self._num_open:
            idle = threading.Event()
            self._jobs.put((idle.set, _nothing))
            self._num_open += 1
            idle.wait()
            self.poll()

    def close(self) -> None:
        """Waits for the running job, and drops all others."""
        while not self._jobs.empty():
            self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join()
        os.close(self.descriptor)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            entry[0]()
            self._done.append(entry[1])
            del entry  # it holds the memory that the job has used
            os.eventfd_write(self.descriptor, 1)


def _nothing() -> None:
    pass
