"""A thread that copies blocks while the worker's main thread runs steps."""

import contextlib
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

Job = Callable[[], None]

SWITCH_INTERVAL_S = 0.0005  # how long a thread waits for the GIL of one that polls without waiting; Python's is 0.005


class CopyThread:
    """One thread that runs jobs in order. A job must spend its time in calls that release the GIL.

    Call its methods from one thread, except `report`. `done` and `failed` run on that thread, inside of `poll` or
    `drain`.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[list[Job] | None] = queue.SimpleQueue()
        self._done: deque[Job] = deque()
        self._num_open = 0
        self._is_closed = False
        self._closing = threading.Lock()  # `report` may not write to a descriptor that is closed
        # this thread and pyzmq's, which returns sent buffers, take the GIL several times for each copy
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable when a job is complete: for select
        self._thread = threading.Thread(target=self._run, name="kv-copies", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], done: Callable[[T], None], failed: Callable[[Exception], None]) -> None:
        """Queues `job`. A later `poll` calls `done` with its result, or `failed` with its exception.

        Raises RuntimeError after `close`.
        """
        outcome: list[T | Exception] = []

        def run() -> None:
            try:
                outcome.append(job())
            except Exception as e:  # noqa: BLE001 - `failed` gets it
                outcome.append(e)

        def report() -> None:
            self._num_open -= 1
            result = outcome[0]
            if isinstance(result, Exception):
                failed(result)
            else:
                done(result)

        if self._is_closed:
            raise RuntimeError("the thread of KV copies is closed")
        self._num_open += 1
        self._jobs.put([run, report])

    def poll(self) -> None:
        """Calls `done` or `failed` of complete jobs. Does not wait."""
        if self._is_closed:
            return
        # reads also if no job is complete: the thread writes after it appends, so an earlier poll may have missed it
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)
        while self._done:
            self._done.popleft()()

    def report(self, done: Job) -> None:
        """A later `poll` calls `done`. Any thread may call this. Ignored after `close`."""
        with self._closing:
            if not self._is_closed:
                self._done.append(done)
                os.eventfd_write(self.descriptor, 1)

    def drain(self) -> None:
        """Waits for all jobs and reports them as `poll` does, also jobs that are submitted meanwhile."""
        while self._num_open:
            idle = threading.Event()
            self._jobs.put([idle.set, self._end_of_drain])
            self._num_open += 1
            idle.wait()
            self.poll()

    def close(self) -> None:
        """Waits for the running job, and drops all others: no `done` or `failed` is called any more."""
        if self._is_closed:
            return
        with self._closing:
            self._is_closed = True
        with contextlib.suppress(queue.Empty):  # the thread may take the last job first
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        self._thread.join()
        self._done.clear()
        self._num_open = 0
        os.close(self.descriptor)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            entry.pop(0)()
            # the thread keeps no reference: a poll that reports the job may be the last user of its memory
            self._done.append(entry.pop())
            os.eventfd_write(self.descriptor, 1)

    def _end_of_drain(self) -> None:
        self._num_open -= 1
