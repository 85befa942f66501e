"""Signs of life over a real pipe, and a clock that leaves out this process's own pauses."""

import os
import time

from blockyard.shared.process.awake_clock import AwakeClock
from blockyard.shared.process.liveness import RUNNING, TURNED, LivenessPipe


def test_a_sign_says_whether_the_loop_has_turned() -> None:
    reading, writing = os.pipe()
    try:
        pipe = LivenessPipe(writing)
        assert os.read(reading, 1) == RUNNING
        pipe.turned()
        assert os.read(reading, 1) == TURNED
        assert os.read(reading, 1) == RUNNING, "it has not turned again"
        assert not os.get_inheritable(writing)
    finally:
        os.close(reading)


def test_a_reader_that_reads_nothing_stops_no_loop() -> None:
    reading, writing = os.pipe()
    try:
        os.set_blocking(writing, False)
        while True:
            try:
                os.write(writing, b"." * 65536)
            except BlockingIOError:
                break
        pipe = LivenessPipe(writing)
        pipe.turned()
        time.sleep(0.02)
        pipe.turned()
        while set(os.read(reading, 65536)) == set(RUNNING):
            pass  # what filled the pipe; then the turn, which was not lost
    finally:
        os.close(reading)


def test_without_a_launcher_nothing_is_written() -> None:
    LivenessPipe(None).turned()


def test_a_pause_of_this_process_counts_little() -> None:
    now = 100.0
    clock = AwakeClock(longest_s=1.0, clock=lambda: now)
    for pause_s, counted_s in ((0.5, 0.5), (1.0, 1.0), (60.0, 1.0), (0.25, 0.25)):
        before, now = clock.now(), now + pause_s
        assert clock.now() - before == counted_s
