"""Jobs of a tokenizer's workers: queued and sent ones, and the job that made a worker end."""

import signal
from collections import deque
from dataclasses import dataclass

from blockyard.services.tokenizer_pool.workers.job_limits import ENCODING, NUM_WORKERS, RENDERING, JobLimits
from blockyard.services.tokenizer_pool.workers.job_turns import JobTurns
from blockyard.services.tokenizer_pool.workers.worker_frames import Work
from blockyard.shared.messages import TAKES_LONG, UNAVAILABLE, TextRejected, Tokenize, TokenizeTexts
from blockyard.shared.process.signals import ended_from_outside

MAX_SENT = 2  # a worker never waits for a job, and few are resent when it ends
MAX_KILLED = NUM_WORKERS + 1  # workers killed in a way that their job may have caused, before the job fails
KILLED_S = 60.0  # since the first kill from outside that a job, or a server that loads, met, before it fails


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    exit_code: int  # negative: killed by this signal; 0: between two jobs
    now_s: float
    was_stuck: bool = False  # the service had it killed, because its job was silent for too long
    growth_bytes: int = 0  # of its memory

    @property
    def is_kill(self) -> bool:
        return ended_from_outside(self.exit_code)


@dataclass(slots=True)
class Job:
    peer: int  # incarnation of the gateway
    work: Work
    num_kills: int = 0  # that it may have caused
    killed_s: float | None = None  # when it first met a kill from outside


class JobQueue:
    """No sockets. A worker answers in order, so it ended during its first sent job.

    No job is sent behind a long one, and long jobs run on all workers but one, so that a quick job waits for none.
    """

    def __init__(self, limits: JobLimits) -> None:
        self._limits = limits
        self._turns: JobTurns[Job] = JobTurns()
        self._sent: dict[int, deque[Job]] = {}  # by worker

    def __len__(self) -> int:
        return len(self._turns) + sum(map(len, self._sent.values()))

    def worker_started(self, worker: int) -> None:
        self._sent[worker] = deque()

    def current(self, worker: int) -> Job | None:
        sent = self._sent.get(worker)
        return sent[0] if sent else None

    def submit(self, peer: int, work: Work) -> None:
        self._turns.push(work.tenant, Job(peer, work), work.quick)

    def to_send(self) -> list[tuple[int, Work]]:
        """Returns the jobs to send now, in order, each with its worker."""
        out = []
        while (worker := self._least_loaded()) is not None:
            num_long = sum(not job.work.quick for sent in self._sent.values() for job in sent)
            job = self._turns.take(may_be_long=num_long < NUM_WORKERS - 1)
            if job is None:
                break
            self._sent[worker].append(job)
            out.append((worker, job.work))
        return out

    def answered(self, worker: int) -> Job:
        return self._sent[worker].popleft()

    def worker_ended(self, worker: int, end: WorkerEnd, max_model_len: int = 0) -> tuple[Job, TextRejected] | None:
        """Queues the worker's unanswered jobs again, except the one that made it end: returned with its answer."""
        sent = self._sent.pop(worker)
        job = sent[0] if sent else None
        refused: tuple[Job, TextRejected] | None = None
        if job is not None and (answer := self._verdict(job, end, max_model_len)) is not None:
            sent.popleft()
            refused = job, answer
        for kept in reversed(sent):
            self._turns.put_back(kept.work.tenant, kept, kept.work.quick)
        return refused

    def _least_loaded(self) -> int | None:
        free = [w for w, sent in self._sent.items() if len(sent) < MAX_SENT and (not sent or sent[-1].work.quick)]
        return min(free, key=lambda w: len(self._sent[w])) if free else None

    def _verdict(self, job: Job, end: WorkerEnd, max_model_len: int) -> TextRejected | None:
        """Returns the answer of the job that the worker ended with; None: it may run again."""
        if end.exit_code == 0:
            return None
        if not end.is_kill:
            return self._answer(job.work, end.exit_code, max_model_len)
        has_grown = end.exit_code == -signal.SIGKILL and end.growth_bytes > self._limits.growth_bytes
        if end.was_stuck or has_grown:  # the kernel kills a process that has grown
            job.num_kills += 1
            return self._answer(job.work, end.exit_code, max_model_len) if job.num_kills >= MAX_KILLED else None
        # an operator, or the kernel because of other processes: no number of such kills says anything about the job
        if job.killed_s is None:
            job.killed_s = end.now_s
        if end.now_s - job.killed_s < KILLED_S:
            return None
        why = f"the processes at work on it were killed from outside for {KILLED_S:g} s; try again"
        return TextRejected(job.work.request_id, _field(job.work), why, UNAVAILABLE)

    def _answer(self, work: Work, exit_code: int, max_model_len: int) -> TextRejected:
        reason = self._grammar_reason(exit_code) if _is_check(work) else self._reason(work, exit_code, max_model_len)
        is_over = exit_code in (-RENDERING, -ENCODING)
        return TextRejected(work.request_id, _field(work), reason, TAKES_LONG if work.quick and is_over else "")

    def _grammar_reason(self, exit_code: int) -> str:
        if exit_code == -RENDERING:
            return f"the grammar takes more than {self._limits.check_cpu_s:g} s of CPU time to compile"
        if exit_code in (-signal.SIGABRT, -signal.SIGKILL):
            return "the grammar takes too much memory or time to compile"
        how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
        return f"the grammar cannot be compiled: the process at work on it ended with {how}"

    def _reason(self, work: Work, exit_code: int, max_model_len: int) -> str:
        if exit_code == -RENDERING:
            return f"the chat template takes more than {self._limits.render_cpu_s:g} s of CPU time"
        what = "the rendered prompt" if isinstance(work, Tokenize) and work.messages is not None else "the text"
        if exit_code == -ENCODING:
            most_s = self._limits.encoding_s(max_model_len)
            return f"{what} takes more than {most_s:.1f} s of CPU time to tokenize"
        if exit_code in (-signal.SIGABRT, -signal.SIGKILL):
            return f"{what} takes too much memory or time to tokenize"
        how = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
        return f"{what} cannot be tokenized: the process at work on it ended with {how}"


def _is_check(work: Work) -> bool:
    return isinstance(work, Tokenize) and work.grammar is not None


def _field(work: Work) -> str:
    if isinstance(work, TokenizeTexts):
        return "input"
    if not isinstance(work, Tokenize):
        return "tokens"
    return "grammar" if _is_check(work) else "prompt" if work.messages is None else "messages"
