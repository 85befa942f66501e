"""When jobs of a child process are overdue, by a clock that the test turns."""

import pytest

from blockyard.services.gpu_worker.child_processes.job_deadlines import JobDeadlines


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_job_counts_from_its_beginning(clock: Clock) -> None:
    deadlines = JobDeadlines(10.0, clock)
    deadlines.begin(1, 5.0)
    clock.now_s += 3.0
    deadlines.begin(2, 5.0)
    deadlines.begin(1, 9.0)  # it is larger than was thought
    clock.now_s += 5.0
    assert deadlines.overdue() == [2] and deadlines.last_begun == 2
    assert deadlines.end(2) == 5.0
    clock.now_s += 1.0
    assert deadlines.overdue() == [1] and deadlines.last_begun == 1
    assert deadlines.end(1) == 9.0
    assert (deadlines.overdue(), deadlines.has_begun, deadlines.last_begun) == ([], False, None)


def test_a_process_is_silent_that_has_begun_nothing(clock: Clock) -> None:
    deadlines = JobDeadlines(10.0, clock)
    clock.now_s += 9.0
    assert not deadlines.is_silent()
    clock.now_s += 1.0
    assert deadlines.is_silent()
    deadlines.hear()
    assert not deadlines.is_silent()
    deadlines.begin(1, 50.0)
    clock.now_s += 20.0
    assert not deadlines.is_silent(), "it reads, and the job has a limit of its own"
