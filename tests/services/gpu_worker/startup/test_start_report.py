"""The line that says where the seconds of a start went."""

import os
import time

from blockyard.services.gpu_worker.startup.start_report import StartReport, process_age_s


def test_the_last_phase_has_a_line_with_the_seconds_of_all() -> None:
    now_s, reports = [10.0], list[tuple[str, list[str]]]()
    report = StartReport(lambda phase, done, notes: reports.append((phase, notes)), 2.25, lambda: now_s[0])

    def take(seconds: float) -> None:
        now_s[0] += seconds

    take(0.5)
    for done in (0.0, 0.5):
        report.phase("loading weights", done)
        take(0.75)
    with report.waiting():
        take(0.25)
    report.phase("planning memory")
    take(0.01)  # too short to be told
    for _ in range(2):  # reported again when more is captured
        report.phase("ready", 1.0, "a note")
    assert reports[-2] == reports[-1]
    assert reports[-1] == (
        "ready",
        [
            "start: 2.2 s imports, 0.5 s setting up the device, 1.8 s loading weights; 0.2 s of it waiting for other "
            "ranks",
            "a note",
        ],
    )


def test_the_age_of_a_process() -> None:
    """Against the time that the kernel gave its folder in /proc, which is of its first look-up."""
    age_s = process_age_s()
    assert time.time() - os.stat("/proc/self").st_ctime - 1.0 < age_s < time.clock_gettime(time.CLOCK_BOOTTIME)
    time.sleep(0.05)
    assert 0.03 < process_age_s() - age_s < 5.0
