"""Jobs of a text worker: queued and sent ones, and the job that made the worker end."""

import signal
from collections import deque
from dataclasses import dataclass

from blockyard.services.tokenizer_pool.job_limits import ENCODING, RENDERING, JobLimits
from blockyard.services.tokenizer_pool.worker_frames import Work
from blockyard.shared.messages import Detokenize, TextRejected, Tokenize

MAX_SENT = 2  # the worker never waits for a job, and few are resent when it ends
MAX_KILLED = 2  # workers killed from outside (by the kernel for memory, by an operator) before a job fails


@dataclass(slots=True)
class Job:
    peer: int  # incarnation of the gateway
    work: Work
    num_kills: int = 0

    def on_killed(self) -> bool:
        """Its worker was killed from outside. Returns True if the job may run again."""
        self.num_kills += 1
        return self.num_kills < MAX_KILLED


class JobQueue:
    """No sockets. The worker answers in order, so it ended during the first sent job."""

    def __init__(self, limits: JobLimits) -> None:
        self._limits = limits
        self._waiting: deque[Job] = deque()
        self._sent: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sent)

    @property
    def current(self) -> Job | None:
        """Returns the job the worker runs."""
        return self._sent[0] if self._sent else None

    def submit(self, peer: int, work: Work) -> None:
        self._waiting.append(Job(peer, work))

    def to_send(self) -> list[Work]:
        """Returns the jobs to send to the worker now, in order."""
        out = []
        while self._waiting and len(self._sent) < MAX_SENT:
            job = self._waiting.popleft()
            self._sent.append(job)
            out.append(job.work)
        return out

    def answered(self) -> Job:
        return self._sent.popleft()

    def worker_ended(self, exit_code: int, max_model_len: int = 0) -> tuple[Job, TextRejected] | None:
        """Queues all unanswered jobs again, except the one that made the worker end: returned with its answer."""
        job = self.current
        self._waiting.extendleft(reversed(self._sent))
        self._sent.clear()
        if job is None or exit_code == 0:  # it ended by itself, between two jobs
            return None
        if exit_code == -signal.SIGKILL and job.on_killed():
            return None
        self._waiting.popleft()
        work = job.work
        if not isinstance(work, Detokenize) and work.grammar is not None:
            return job, TextRejected(work.request_id, "grammar", self._grammar_reason(exit_code))
        field = "tokens" if isinstance(work, Detokenize) else "prompt" if work.messages is None else "messages"
        return job, TextRejected(work.request_id, field, self._reason(work, exit_code, max_model_len))

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
