"""Starts `blockyard serve` for the suite and sends requests to it."""

import asyncio
import contextlib
import itertools
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import uvloop

from blockyard.services.bench.datasets import RandomIds, SampleRequest
from blockyard.services.bench.load import client, processes
from blockyard.services.bench.load.client import Endpoint, LoadPlan, LoadRun
from blockyard.services.bench.load.results import BenchError, RequestResult, decode_chunk
from blockyard.services.bench.server import find
from blockyard.shared.messages import Role

READY_S = 600.0  # longest start
END_S = 60.0  # longest stop
VOCAB = (100, 4000)  # token ids of prompts
LOG_TAIL = 2000  # characters of a failed server's output that are shown
KINDS = ("prefill", "decode")  # of steps, in /metrics


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """Sums over all workers of a server. Times are by kind of step."""

    experts_hit: float = 0.0  # that sampled steps have chosen
    experts_hit_if_even: float = 0.0  # that they would have chosen on average with even routing
    step_s: dict[str, float] = field(default_factory=dict)
    launch_s: dict[str, float] = field(default_factory=dict)  # the part of it in which the host launched kernels

    def launch_shares(self, before: "WorkerCounters") -> dict[str, float]:
        """The share of step time that launches took since `before`, by kind of step. Empty where the host computes."""
        return {
            kind: (launch_s - before.launch_s[kind]) / (self.step_s[kind] - before.step_s[kind])
            for kind, launch_s in self.launch_s.items()
            if launch_s > before.launch_s[kind]
        }


@dataclass(frozen=True, slots=True)
class SuiteServer:
    """A running server. Times are perf_counter's."""

    url: str
    launched_s: float
    full_s: float = 0.0  # from launch until all decode graphs were captured; set by `complete`

    def complete(self) -> "SuiteServer":
        """Waits until the workers have captured all graphs and returns this server with `full_s` set."""
        while any(member.role == Role.GPU_WORKER and member.progress < 1.0 for member in _members(self.url)):
            if time.perf_counter() - self.launched_s > READY_S:
                raise BenchError(f"graphs were not captured within {READY_S:g} s")
            time.sleep(0.02)
        return replace(self, full_s=time.perf_counter() - self.launched_s)

    def members(self) -> "list[MemberState]":
        return _members(self.url)

    def counters(self) -> "WorkerCounters":
        lines = self._metrics()

        def total(name: str, label: str = "") -> float:
            return sum(_values(lines, name, label))

        def seconds(what: str) -> dict[str, float]:
            return {kind: total(f"worker_{what}_seconds_sum", f'kind="{kind}"') for kind in KINDS}

        experts = total("experts_hit_total"), total("experts_hit_if_even_total")
        return WorkerCounters(*experts, seconds("step"), seconds("launch"))

    def fullest_rank(self) -> float:
        """Returns the load of the fullest rank over the mean in the worst layer with experts; 0: none move."""
        return max(_values(self._metrics(), "expert_rank_load_worst"), default=0.0)

    def _metrics(self) -> list[str]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            lines: list[str] = answer.read().decode().splitlines()
        return lines

    def events(self, request: SampleRequest) -> Iterator[float]:
        """Yields the time of each event of a stream as it arrives. Raises BenchError for an error, or OSError."""
        for _ in self._chunks(_body(request)):
            yield time.perf_counter()

    def texts(self, requests: Sequence[SampleRequest], at_half: Callable[[], None] | None = None) -> list[str]:
        """Returns the text of each; all run at once, with seeds of their own.

        at_half: called when the first one has half of its tokens. Raises BenchError or OSError.
        """

        def read(index: int) -> str:
            text = ""
            chunks = self._chunks(_body(requests[index]) | {"temperature": 1.0, "seed": index})
            for num, chunk in enumerate(chunks, 1):
                text += "".join(choice.text or "" for choice in decode_chunk(chunk).choices)
                if at_half is not None and index == 0 and num == requests[0].num_output // 2:
                    at_half()
            return text

        with ThreadPoolExecutor(len(requests)) as threads:
            return list(threads.map(read, range(len(requests))))

    def _chunks(self, body: dict[str, object]) -> Iterator[bytes]:
        """Yields the JSON of each event of a stream as it arrives. Raises BenchError for an error, or OSError."""
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/v1/completions", msgspec.json.encode(body), headers=headers)
        with urllib.request.urlopen(asked, timeout=READY_S) as answer:
            for line in answer:
                if line.startswith(b'data: {"error"'):
                    raise BenchError(f"a request failed: {line.decode().strip()}")
                if line.startswith(b"data: {"):
                    yield line.removeprefix(b"data: ")

    def stream(
        self,
        requests: Sequence[SampleRequest],
        each_token: bool = True,
        due_s: Sequence[float] | None = None,
        models: Sequence[str] = (),
        merged: float = 0.0,
        max_concurrency: int | None = None,
    ) -> list[RequestResult]:
        """Sends each on its own connection, `due_s` after the start (all at once), but only so many at a time. models:
        those that requests name in turn, "" is the server's own.

        Raises BenchError if a request fails or has another length.

        `each_token`: requires an event for every token. Random weights sample many tokens without text, so token ids
        are requested as well. The last token may share an event with the end of the response. merged: the share of a
        request's tokens that may be in the event of another, where a server or this client is late.
        """
        endpoint = find(self.url, None).endpoint("completions")
        more = {"return_token_ids": True} if each_token else {}
        named = itertools.cycle(models or [""])
        bodies = [
            endpoint.request(_body(request) | more | ({"model": model} if model else {}))
            for request, model in zip(requests, named, strict=False)
        ]
        plan = LoadPlan(bodies, [0.0] * len(bodies) if due_s is None else due_s, max_concurrency)
        output_lens = [request.num_output for request in requests]
        results = run_load(endpoint, plan, output_lens, processes.num_for(max_concurrency or len(requests)))
        for request, one in zip(requests, results, strict=True):
            if one.failure:
                raise BenchError(f"a request failed: {one.failure}")
            if (one.num_input, one.num_output) != (request.num_input, request.num_output):
                wanted = f"a request of {request.num_input} and {request.num_output} tokens"
                raise BenchError(f"{wanted} was {one.num_input} and {one.num_output}")
            if each_token and len(one.tokens_s) < (1.0 - merged) * request.num_output - 1:
                raise BenchError(f"{len(one.tokens_s)} events for {request.num_output} tokens: not one for each")
        return results


def run_load(endpoint: Endpoint, plan: LoadPlan, output_lens: list[int], num: int) -> list[RequestResult]:
    """Sends a plan's requests from `num` processes; responses are parsed behind the last. Errors: `processes.run`."""
    with client.QuietProcess(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        read = runner.run(processes.run(endpoint, plan, output_lens, LoadRun(), num))
    return read()


def _values(lines: Sequence[str], name: str, label: str = "") -> list[float]:
    return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"blockyard:{name}{{") and label in line]


def random_requests(num: int, num_input: int, num_output: int, seed: int) -> list[SampleRequest]:
    """Returns random prompts that share no prefix."""
    make_prompt, rng = RandomIds(*VOCAB), random.Random(seed)
    return [SampleRequest(make_prompt(rng, num_input), num_input, num_output) for _ in range(num)]


def _body(request: SampleRequest) -> dict[str, object]:
    return {
        "prompt": request.prompt,
        "max_tokens": request.num_output,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def serve(
    model: Path, flags: Sequence[str], log: Path, most_s: float = threading.TIMEOUT_MAX
) -> contextlib.AbstractContextManager[SuiteServer]:
    """Runs `blockyard serve` of `model` with random weights. See `run_server`."""
    command = [sys.executable, "-P", "-m", "blockyard", "serve", str(model), "--host", "127.0.0.1", "--port", "{port}"]
    more = ["--tokenizer", str(model), "--load-format", "dummy"]
    return run_server([*command, *more, *flags], "/ready", log, most_s)


@contextlib.contextmanager
def run_server(command: Sequence[str], ready: str, log: Path, most_s: float) -> Iterator[SuiteServer]:
    """Runs a server on a free port until the block ends. most_s: seconds after which it is killed.

    command: with {port} as a word. ready: the path that answers 200 once it serves. Raises BenchError if none does.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    words = [str(port) if word == "{port}" else word for word in command]
    with log.open("wb") as out:
        launched_s = time.perf_counter()
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
        timer = threading.Timer(min(most_s, threading.TIMEOUT_MAX), process.kill)
        timer.daemon = True
        timer.start()
        try:
            _wait_ready(url + ready, process, launched_s, log)
            yield SuiteServer(url, launched_s)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            timer.cancel()


@dataclass(frozen=True, slots=True)
class RankState:
    """A process of a worker with several."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """The counters of a member in `/ring` that are needed here."""

    blocks_total: int = 0  # KV blocks, of schedulers


@dataclass(frozen=True, slots=True)
class MemberState:
    """The fields of a member in `/ring` that are needed here."""

    role: str
    progress: float
    stats: BlockCounts = BlockCounts()
    ranks: list[RankState] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _RingState:
    members: list[MemberState]


def _members(url: str) -> list[MemberState]:
    with urllib.request.urlopen(f"{url}/ring", timeout=5) as answer:
        return msgspec.json.decode(answer.read(), type=_RingState).members


def _wait_ready(url: str, process: "subprocess.Popen[bytes]", launched_s: float, log: Path) -> None:
    while True:
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(url, timeout=5) as answer,
        ):
            if answer.status == 200:
                return
        if process.poll() is not None:
            tail = log.read_text(errors="replace")[-LOG_TAIL:]
            raise BenchError(f"the server ended with {process.returncode} before it was ready:\n{tail}")
        if time.perf_counter() - launched_s > READY_S:
            raise BenchError(f"the server was not ready within {READY_S:g} s")
        time.sleep(0.01)
