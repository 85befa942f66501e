"""Busy times of processes, and what is made of samples."""

import os
import subprocess
import sys
import time

import pytest

from blockyard.services.bench.load.results import BenchError
from blockyard.services.bench.parallel.busy import BusySampler, of_processes

EVERY_S = 0.02


def test_a_process_that_computes_is_busy_and_one_that_sleeps_is_not() -> None:
    spinning, sleeping = (
        subprocess.Popen([sys.executable, "-c", code]) for code in ("while True: pass", "import time; time.sleep(60)")
    )
    try:
        time.sleep(0.3)
        read = of_processes([spinning.pid, sleeping.pid])
        assert read() == {}, "there is no sample before"
        time.sleep(0.5)
        found = read()
    finally:
        for one in (spinning, sleeping):
            one.kill()
            one.wait()
    assert found[0] > 0.1 and found[1] < 0.05


def test_the_place_that_is_idle_most_counts() -> None:
    sampler = BusySampler(lambda: {0: 0.9, 1: 1.5, 2: 0.4}, EVERY_S)
    with sampler.running():
        begin_s = time.perf_counter()
        time.sleep(10 * EVERY_S)
        end_s = time.perf_counter()
    assert sampler.most_idle(begin_s, end_s) == pytest.approx(0.6)
    with pytest.raises(BenchError, match="too short"):
        sampler.most_idle(end_s + 1, end_s + 2)


def test_unreadable_times_are_an_error() -> None:
    sampler = BusySampler(of_processes([os.getpid(), 2**30]), EVERY_S)
    with sampler.running():
        time.sleep(5 * EVERY_S)
    with pytest.raises(BenchError, match=r"busy times could not be read: FileNotFoundError"):
        sampler.most_idle(0, time.perf_counter())
