"""The order in which jobs are sent, and the job that is blamed for a worker's end."""

import signal

import pytest

from blockyard.services.tokenizer_pool.job_limits import ENCODING, RENDERING, JobLimits
from blockyard.services.tokenizer_pool.job_queue import MAX_SENT, JobQueue
from blockyard.shared.messages import Detokenize, Tokenize

LIMITS = JobLimits()


def queue(*names: str) -> JobQueue:
    made = JobQueue(LIMITS)
    for i, name in enumerate(names):
        made.submit(i, Tokenize(name, "m", text="x"))
    return made


def sent(jobs: JobQueue) -> list[str]:
    return [work.request_id for work in jobs.to_send()]


def test_few_jobs_are_in_flight_and_all_are_sent_in_order() -> None:
    jobs = queue("a", "b", "c")
    assert sent(jobs) == ["a", "b"] and MAX_SENT == 2
    assert sent(jobs) == [] and len(jobs) == 3
    assert (jobs.answered().peer, sent(jobs)) == (0, ["c"])
    assert [jobs.answered().peer, jobs.answered().peer] == [1, 2]
    assert len(jobs) == 0 and jobs.current is None


@pytest.mark.parametrize("exit_code", [-RENDERING, -ENCODING, -signal.SIGABRT, -signal.SIGSEGV, 1])
def test_the_running_job_is_blamed_and_the_others_are_sent_again(exit_code: int) -> None:
    jobs = queue("a", "b", "c")
    sent(jobs)
    refused = jobs.worker_ended(exit_code)
    assert refused is not None
    job, answer = refused
    assert (job.peer, answer.request_id, answer.field) == (0, "a", "prompt")
    assert sent(jobs) == ["b", "c"]


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
    jobs = JobQueue(LIMITS)
    jobs.submit(7, work)
    jobs.to_send()
    refused = jobs.worker_ended(exit_code, max_model_len=4096)
    assert refused is not None
    assert refused[1].field == field and message in refused[1].message


def test_a_worker_that_is_killed_from_outside_blames_its_job_the_second_time() -> None:
    jobs = queue("a", "b")
    sent(jobs)
    assert jobs.worker_ended(-signal.SIGKILL) is None
    assert sent(jobs) == ["a", "b"]
    refused = jobs.worker_ended(-signal.SIGKILL)
    assert refused is not None and refused[1].request_id == "a"
    assert sent(jobs) == ["b"]


def test_a_worker_that_ends_by_itself_blames_none() -> None:
    jobs = queue("a")
    for _ in range(5):
        assert sent(jobs) == ["a"]
        assert jobs.worker_ended(0) is None
    assert queue().worker_ended(-signal.SIGSEGV) is None
