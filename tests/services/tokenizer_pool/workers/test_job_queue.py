"""The order in which jobs are sent, and the job that is blamed for a worker's end."""

import signal

import pytest

from blockyard.services.tokenizer_pool.workers.job_limits import ENCODING, RENDERING, JobLimits
from blockyard.services.tokenizer_pool.workers.job_queue import KILLED_S, MAX_KILLED, MAX_SENT, JobQueue, WorkerEnd
from blockyard.shared.messages import TAKES_LONG, UNAVAILABLE, Detokenize, Grammar, GrammarKind, Tokenize

LIMITS = JobLimits()
WORKER, OTHER = 11, 12


def queue(*names: str, workers: tuple[int, ...] = (WORKER,), quick: bool = True) -> JobQueue:
    made = JobQueue(LIMITS)
    for worker in workers:
        made.worker_started(worker)
    for i, name in enumerate(names):
        made.submit(i, Tokenize(name, "m", text="x", quick=quick))
    return made


def sent(jobs: JobQueue) -> list[str]:
    return [work.request_id for _, work in jobs.to_send()]


def again(jobs: JobQueue) -> list[str]:
    """What is sent to a worker that replaces the first one."""
    jobs.worker_started(WORKER)
    return sent(jobs)


def test_few_jobs_are_in_flight_and_all_are_sent_in_order() -> None:
    jobs = queue("a", "b", "c")
    assert sent(jobs) == ["a", "b"] and MAX_SENT == 2
    assert sent(jobs) == [] and len(jobs) == 3
    assert (jobs.answered(WORKER).peer, sent(jobs)) == (0, ["c"])
    assert [jobs.answered(WORKER).peer, jobs.answered(WORKER).peer] == [1, 2]
    assert len(jobs) == 0 and jobs.current(WORKER) is None


def test_workers_share_quick_jobs_and_one_of_them_is_kept_from_long_ones() -> None:
    jobs = queue("a", "b", "c", workers=(WORKER, OTHER), quick=False)
    assert sent(jobs) == ["a"] and jobs.current(WORKER) is not None
    for name in "xyz":
        jobs.submit(1, Tokenize(name, "m", text="x", quick=True))
    assert [(worker, work.request_id) for worker, work in jobs.to_send()] == [(OTHER, "x"), (OTHER, "y")]
    jobs.answered(WORKER)
    assert [(worker, work.request_id) for worker, work in jobs.to_send()] == [(WORKER, "z"), (WORKER, "b")]


@pytest.mark.parametrize("exit_code", [-RENDERING, -ENCODING, -signal.SIGABRT, -signal.SIGSEGV, 1])
def test_the_running_job_is_blamed_and_the_others_are_sent_again(exit_code: int) -> None:
    jobs = queue("a", "b", "c")
    sent(jobs)
    refused = jobs.worker_ended(WORKER, WorkerEnd(exit_code, 0.0))
    assert refused is not None
    job, answer = refused
    assert (job.peer, answer.request_id, answer.field) == (0, "a", "prompt")
    assert (answer.code == TAKES_LONG) == (exit_code in (-RENDERING, -ENCODING))
    assert again(jobs) == ["b", "c"]


@pytest.mark.parametrize(
    ("work", "exit_code", "field", "message"),
    [
        (Tokenize("r", "m", messages=b"[]"), -RENDERING, "messages", "the chat template takes more than 2 s"),
        (Tokenize("r", "m", messages=b"[]"), -ENCODING, "messages", "the rendered prompt takes more than 2.1 s"),
        (Tokenize("r", "m", text="x"), -ENCODING, "prompt", "the text takes more than 2.1 s"),
        (Tokenize("r", "m", text="x"), -signal.SIGABRT, "prompt", "too much memory"),
        (Detokenize("r", "m", b""), -signal.SIGSEGV, "tokens", "SIGSEGV"),
        (Detokenize("r", "m", b""), 1, "tokens", "exit code 1"),
    ],
)
def test_the_answer_names_the_exceeded_limit(
    work: Tokenize | Detokenize, exit_code: int, field: str, message: str
) -> None:
    jobs = queue()
    jobs.submit(7, work)
    jobs.to_send()
    refused = jobs.worker_ended(WORKER, WorkerEnd(exit_code, 0.0), max_model_len=4096)
    assert refused is not None and not refused[1].code
    assert refused[1].field == field and message in refused[1].message


STUCK = WorkerEnd(-signal.SIGKILL, 0.0, was_stuck=True)
GROWN = WorkerEnd(-signal.SIGKILL, 0.0, growth_bytes=LIMITS.growth_bytes + 1)


@pytest.mark.parametrize("end", [STUCK, GROWN], ids=["stuck", "grown"])
def test_a_job_that_workers_were_killed_for_is_to_blame(end: WorkerEnd) -> None:
    jobs = queue("a", "b")
    sent(jobs)
    for _ in range(MAX_KILLED - 1):
        assert jobs.worker_ended(WORKER, end) is None
        assert again(jobs) == ["a", "b"]
    refused = jobs.worker_ended(WORKER, end)
    assert refused is not None and refused[1].request_id == "a" and not refused[1].code
    assert again(jobs) == ["b"]


def killed(at_s: float, number: signal.Signals = signal.SIGKILL) -> WorkerEnd:
    return WorkerEnd(-number, at_s, growth_bytes=LIMITS.growth_bytes // 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_signals_from_outside_blame_no_job_however_many_they_are(number: signal.Signals) -> None:
    jobs = queue()
    jobs.submit(0, Tokenize("a", "m", grammar=Grammar(GrammarKind.REGEX, "a")))
    assert sent(jobs) == ["a"]
    for i in range(100):
        assert jobs.worker_ended(WORKER, killed(100 + i * KILLED_S / 101, number)) is None
        assert again(jobs) == ["a"]
    refused = jobs.worker_ended(WORKER, killed(100 + KILLED_S, number))
    assert refused is not None and refused[1].code == UNAVAILABLE and refused[1].field == "grammar"


def test_a_job_that_crashes_its_worker_is_refused_at_once_amid_kills() -> None:
    jobs = queue("a", "b")
    sent(jobs)
    assert jobs.worker_ended(WORKER, killed(0.0)) is None
    assert again(jobs) == ["a", "b"]
    refused = jobs.worker_ended(WORKER, WorkerEnd(-signal.SIGSEGV, 1.0))
    assert refused is not None and refused[1].request_id == "a" and "SIGSEGV" in refused[1].message


def test_a_worker_that_ends_by_itself_blames_none() -> None:
    jobs = queue("a")
    for _ in range(5):
        assert sent(jobs) == ["a"]
        assert jobs.worker_ended(WORKER, WorkerEnd(0, 0.0)) is None
        jobs.worker_started(WORKER)
    assert queue().worker_ended(WORKER, WorkerEnd(-signal.SIGSEGV, 0.0)) is None
