"""The copy thread alone: order, exceptions, its descriptor, and closing it while jobs are open."""

import os
import queue
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from blockyard.services.kv_transfer.copy_thread import CopyThread


@pytest.fixture
def copies() -> Iterator[CopyThread]:
    it = CopyThread()
    yield it
    it.close()


def fail(error: Exception) -> None:
    raise AssertionError(f"reported as failed: {error!r}")


def is_readable(copies: CopyThread, timeout_s: float = 0) -> bool:
    return bool(select.select([copies.descriptor], [], [], timeout_s)[0])


def raises(error: Exception) -> Callable[[], None]:
    def job() -> None:
        raise error

    return job


def test_jobs_run_in_order_and_are_reported_by_poll_on_the_callers_thread(copies: CopyThread) -> None:
    ran: list[tuple[int, str]] = []
    reported: list[tuple[int, str]] = []

    def job(i: int) -> int:
        ran.append((i, threading.current_thread().name))
        return i

    def done(i: int) -> None:
        reported.append((i, threading.current_thread().name))

    last = threading.Event()
    for i in range(5):
        copies.submit(lambda i=i: job(i), done, fail)
    copies.submit(last.set, lambda _: None, fail)
    assert last.wait(10) and reported == []
    while len(reported) < 5:
        assert is_readable(copies, 10)
        copies.poll()
    assert ran == [(i, "kv-copies") for i in range(5)]
    assert reported == [(i, threading.current_thread().name) for i in range(5)]


def test_an_exception_goes_to_the_caller_and_the_thread_goes_on(copies: CopyThread) -> None:
    failed: list[Exception] = []
    done: list[object] = []
    error = ValueError("no such block")
    copies.submit(raises(error), done.append, failed.append)
    copies.submit(lambda: 7, done.append, fail)
    copies.drain()
    assert failed == [error] and done == [7]


def test_drain_waits_for_jobs_that_reports_submit(copies: CopyThread) -> None:
    done: list[int] = []
    copies.submit(lambda: 1, lambda value: copies.submit(lambda: value + 1, done.append, fail), fail)
    copies.drain()
    assert done == [2]
    copies.poll()
    assert not is_readable(copies)


def test_poll_clears_the_descriptor_of_a_job_that_was_reported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread writes to the descriptor after it appends a complete job: a poll between the two reports the job.

    The descriptor must not stay readable after the next poll, or a loop that waits for it never sleeps.
    """
    write, release, reported = os.eventfd_write, threading.Event(), threading.Event()
    monkeypatch.setattr(os, "eventfd_write", lambda fd, n: (release.wait(10), write(fd, n)))
    copies = CopyThread()
    copies.submit(lambda: None, lambda _: reported.set(), fail)
    deadline = time.monotonic() + 10
    while not reported.is_set():
        assert time.monotonic() < deadline
        copies.poll()
    assert not is_readable(copies)
    release.set()
    assert is_readable(copies, 10)
    copies.poll()
    assert not is_readable(copies)
    copies.close()


def test_close_waits_for_the_running_job_and_drops_the_others() -> None:
    copies = CopyThread()
    running, release = threading.Event(), threading.Event()
    ended, threads = list[str](), list[threading.Thread]()

    def slow() -> None:
        threads.append(threading.current_thread())
        running.set()
        assert release.wait(10)
        ended.append("slow")

    copies.submit(slow, lambda _: ended.append("reported"), fail)
    for _ in range(3):
        copies.submit(lambda: ended.append("dropped"), lambda _: ended.append("reported"), fail)
    assert running.wait(10)
    timer = threading.Timer(0.05, release.set)
    timer.start()
    copies.close()
    timer.join()
    assert ended == ["slow"] and not threads[0].is_alive()
    copies.poll()
    copies.drain()
    copies.close()
    assert ended == ["slow"]
    with pytest.raises(RuntimeError, match="closed"):
        copies.submit(lambda: None, lambda _: None, fail)


def test_close_while_the_thread_takes_the_last_job(monkeypatch: pytest.MonkeyPatch) -> None:
    class TakenFirst(queue.Queue[Any]):
        """The queue, as `close` finds it if the thread is always quicker to take a job."""

        def get_nowait(self) -> None:
            while not self.empty():
                super().get_nowait()
            raise queue.Empty

    monkeypatch.setattr(queue, "SimpleQueue", TakenFirst)
    copies, running, release = CopyThread(), threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def slow() -> None:
        threads.append(threading.current_thread())
        running.set()
        release.wait(10)

    copies.submit(slow, lambda _: None, fail)
    copies.submit(lambda: None, lambda _: None, fail)
    assert running.wait(10)
    threading.Timer(0.05, release.set).start()
    copies.close()
    assert not threads[0].is_alive()


def test_other_threads_report_and_do_nothing_after_close() -> None:
    copies, reported = CopyThread(), []
    thread = threading.Thread(target=lambda: copies.report(lambda: reported.append(threading.current_thread())))
    thread.start()
    assert is_readable(copies, 10) and reported == []
    thread.join()
    copies.poll()
    assert reported == [threading.current_thread()]
    copies.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)  # has the descriptor's number
    copies.report(lambda: reported.append(None))
    assert not select.select([other], [], [], 0)[0] and len(reported) == 1
    os.close(other)
