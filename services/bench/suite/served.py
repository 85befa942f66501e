"""A `blockyard serve` of the suite's own, and requests to it."""

import asyncio
import contextlib
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import uvloop

from blockyard.services.bench.datasets import RandomIds, SampleRequest
from blockyard.services.bench.load import client, processes
from blockyard.services.bench.load.client import LoadPlan, LoadRun
from blockyard.services.bench.load.results import RequestResult
from blockyard.services.bench.server import BenchError, find
from blockyard.shared.messages import Role

READY_S = 600.0  # that a start may take
END_S = 60.0
VOCAB = (100, 4000)  # ids of prompts; the tokenizer knows them
LOG_TAIL = 2000  # characters of a server's output that are shown when it fails


@dataclass(frozen=True, slots=True)
class SuiteServer:
    """A server that answers. Times are perf_counter's."""

    url: str
    launched_s: float
    ready_s: float  # from launch
    full_s: float = 0.0  # from launch until decode steps of all sizes had their graph, once that was waited for

    def complete(self) -> "SuiteServer":
        """The same, once its workers have captured all their graphs."""
        while any(member.role == Role.GPU_WORKER and member.progress < 1.0 for member in _members(self.url)):
            if time.perf_counter() - self.launched_s > READY_S:
                raise BenchError(f"graphs were not captured within {READY_S:g} s")
            time.sleep(0.02)
        return replace(self, full_s=time.perf_counter() - self.launched_s)

    def stream(self, asks: Sequence[SampleRequest], each_token: bool = True) -> list[RequestResult]:
        """All at once, a connection each. Raises BenchError if one fails or has not the length that was asked for.

        `each_token`: tokens without text are events too, by their ids; random weights draw many that the tokenizer
        makes no text of. The last one may come with the end of the answer. BenchError if others are missing.
        """
        target = find(self.url, None).target("completions")
        more = {"return_token_ids": True} if each_token else {}
        requests = [target.request(_body(ask) | more) for ask in asks]
        plan, asked = LoadPlan(requests, [0.0] * len(requests)), [ask.num_output for ask in asks]
        with client.QuietProcess(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            read = runner.run(processes.run(target, plan, asked, LoadRun(), processes.num_for(len(asks))))
        outcomes = read()
        for ask, one in zip(asks, outcomes, strict=True):
            if one.failure:
                raise BenchError(f"a request failed: {one.failure}")
            if (one.num_input, one.num_output) != (ask.num_input, ask.num_output):
                raise BenchError(
                    f"a request of {ask.num_input} and {ask.num_output} tokens was {one.num_input} and {one.num_output}"
                )
            if each_token and len(one.tokens_s) < ask.num_output - 1:
                raise BenchError(f"{len(one.tokens_s)} events for {ask.num_output} tokens: the gaps are not a token's")
        return outcomes


def random_requests(num: int, num_input: int, num_output: int, seed: int) -> list[SampleRequest]:
    """Prompts that share no prefix."""
    draw, rng = RandomIds(*VOCAB), random.Random(seed)
    return [SampleRequest(draw(rng, num_input), num_input, num_output) for _ in range(num)]


def _body(ask: SampleRequest) -> dict[str, object]:
    return {
        "prompt": ask.prompt,
        "max_tokens": ask.num_output,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@contextlib.contextmanager
def serve(model: Path, flags: Sequence[str], log: Path) -> Iterator[SuiteServer]:
    """`model` on a free port of this host until the block ends. Raises BenchError if it does not get ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-P", "-m", "blockyard", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--tokenizer", str(model), "--load-format", "dummy", *flags]
    with log.open("wb") as out:
        launched_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            _wait_ready(url, process, launched_s, log)
            yield SuiteServer(url, launched_s, time.perf_counter() - launched_s)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True, slots=True)
class _MemberState:
    """What `/ring` shows of a member, as far as it is needed here."""

    role: str
    progress: float


@dataclass(frozen=True, slots=True)
class _RingState:
    members: list[_MemberState]


def _members(url: str) -> list[_MemberState]:
    with urllib.request.urlopen(f"{url}/ring", timeout=5) as answer:
        return msgspec.json.decode(answer.read(), type=_RingState).members


def _wait_ready(url: str, process: "subprocess.Popen[bytes]", launched_s: float, log: Path) -> None:
    while True:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(f"{url}/ready", timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        if process.poll() is not None:
            tail = log.read_text(errors="replace")[-LOG_TAIL:]
            raise BenchError(f"the server ended with {process.returncode} before it was ready:\n{tail}")
        if time.perf_counter() - launched_s > READY_S:
            raise BenchError(f"the server was not ready within {READY_S:g} s")
        time.sleep(0.01)
