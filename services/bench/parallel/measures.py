"""The figures of one running server, or of its start. Times are in ms unless named otherwise."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec

from blockyard.services.bench import metrics
from blockyard.services.bench.load.results import BenchError
from blockyard.services.bench.parallel.busy import BusySampler, of_gpus, of_processes
from blockyard.services.bench.parallel.layouts import Layout, has_gpu
from blockyard.services.bench.suite.measures import all_running, gaps_among
from blockyard.services.bench.suite.served import SuiteServer, random_requests
from blockyard.shared.messages import Role
from blockyard.shared.percentiles import percentile

KIB = 1024
T = TypeVar("T")
BALANCE_FLAGS = (  # experts move after 64 steps, those of a layer in each step from there
    *("--load-format", "dummy-skewed", "--enable-eplb", "--eplb-config"),
    '{"step_interval": 64, "window_size": 64}',
)
# mostly prompts: tokens of a stream with random weights repeat themselves, and so do their experts
BALANCE_OUTPUT = 16  # tokens of a stream
BALANCE_RUNS = 16  # of the prompts of several streams: four intervals or more
COUNTED_S = 5.0  # until the first counters of a worker are shown


class ParallelSizes(msgspec.Struct, frozen=True):
    """Sizes of the loads. Lengths are in tokens."""

    runs: int = 2
    stream: tuple[int, int] = (128, 256)  # one stream: in, out
    streams: int = 64
    streams_len: tuple[int, int] = (960, 128)
    many: int = 256
    many_len: tuple[int, int] = (896, 256)
    prompt: int = 8192
    long_prompt: int = 32000
    killed_output: int = 256  # of the stream whose rank is killed
    kill_after: int = 20  # events of it
    sums: tuple[int, ...] = (16 * KIB, 512 * KIB, KIB**2, 2 * KIB**2, 16 * KIB**2, 64 * KIB**2)  # bytes


class ServerFigures:
    """Measures a server when asked. A load that gives two figures runs once."""

    def __init__(self, served: SuiteServer, layout: Layout, sizes: ParallelSizes) -> None:
        self._served, self._layout, self._sizes = served, layout, sizes
        self._rate: tuple[float, float | BenchError] | None = None  # tokens/s, and the idle share

    def one_stream(self) -> float:
        """Returns p50 of the gaps between tokens of one stream."""
        return self._gaps(1, *self._sizes.stream)

    def some_streams(self) -> float:
        """Returns the same of several, while all of them run."""
        return self._gaps(self._sizes.streams, *self._sizes.streams_len)

    def first_token(self) -> float:
        """Returns the time from sending a prompt to its first token, the median of a few."""
        return self._ttft(self._sizes.prompt)

    def first_token_long(self) -> float:
        return self._ttft(self._sizes.long_prompt)

    def rate(self) -> float:
        """Returns the tokens/s of many streams, while all of them run."""
        return self._many()[0]

    def idle(self) -> float:
        """Returns the share of that time in which a GPU had no kernel, of the GPU with the largest."""
        idle = self._many()[1]
        if isinstance(idle, BenchError):
            raise idle
        return idle

    def kv_blocks(self) -> float:
        """Returns the number of KV blocks, of all schedulers. Raises BenchError if none are shown."""
        return counted(
            lambda: sum(one.stats.blocks_total for one in self._served.members() if one.role == Role.SCHEDULER),
            "no scheduler has KV blocks",
        )

    def _gaps(self, num: int, num_input: int, num_output: int) -> float:
        self._served.stream(random_requests(num, num_input, 8, seed=-1), each_token=False)
        gaps: list[float] = []
        for run in range(self._sizes.runs):
            results = self._served.stream(random_requests(num, num_input, num_output, seed=run))
            gaps += [gap for one in results for gap in gaps_among(results, one)]
        return 1e3 * percentile(sorted(gaps), 50)

    def _ttft(self, num_input: int) -> float:
        requests = [random_requests(1, num_input, 1, seed=run) for run in range(self._sizes.runs + 1)]
        times = [metrics.ttft_s(self._served.stream(one)[0]) for one in requests]
        return 1e3 * percentile(sorted(times[1:]), 50)

    def _many(self) -> tuple[float, float | BenchError]:
        if self._rate is None:
            self._served.stream(random_requests(self._sizes.many, 64, 8, seed=-1), each_token=False)
            sampler = self._sampler()
            with sampler.running():
                results = self._served.stream(random_requests(self._sizes.many, *self._sizes.many_len, seed=0))
            begin, end = all_running(results)
            idle: float | BenchError
            try:
                idle = sampler.most_idle(begin, end)
            except BenchError as e:
                idle = e
            self._rate = sum(begin < at <= end for one in results for at in one.tokens_s) / (end - begin), idle
        return self._rate

    def _sampler(self) -> BusySampler:
        if has_gpu():
            return BusySampler(of_gpus(self._layout.num_gpus))
        return BusySampler(of_processes(rank_pids(self._served)))


def rank_pids(served: SuiteServer) -> list[int]:
    """Returns the processes of workers with several ranks, leaders first. Raises BenchError if there are none."""
    ranks = counted(
        lambda: [rank for member in served.members() for rank in member.ranks],
        "no worker of this layout has several ranks",
    )
    return [rank.pid for rank in sorted(ranks, key=lambda one: one.rank)]


def counted(read: Callable[[], T], problem: str) -> T:
    """Returns what is shown once the first counters have come. Raises BenchError if that is nothing."""
    ends_s = time.perf_counter() + COUNTED_S
    while not (found := read()):
        if time.perf_counter() > ends_s:
            raise BenchError(problem)
        time.sleep(0.05)
    return found


def first_token_s(served: SuiteServer) -> float:
    """Returns the seconds from the launch of a server to its first token."""
    result = served.stream(random_requests(1, 32, 2, seed=0))[0]
    return result.tokens_s[0] - served.launched_s


def killed_rank_s(served: SuiteServer, sizes: ParallelSizes, kill: Callable[[int, int], None] = os.kill) -> float:
    """Kills the last rank in mid-stream. Returns the seconds from there to the next token. Raises BenchError."""
    pids, times, killed_s = rank_pids(served), list[float](), 0.0
    for at in served.events(random_requests(1, 32, sizes.killed_output, seed=1)[0]):
        times.append(at)
        if len(times) == sizes.kill_after:
            killed_s = time.perf_counter()
            kill(pids[-1], signal.SIGKILL)
    if not killed_s:
        raise BenchError(f"the stream had {len(times)} events, and its rank was to be killed after {sizes.kill_after}")
    return until_next_token(times, killed_s)


def fullest_to_mean(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns the load of the fullest rank over the mean once experts have moved, in the worst layer of a server with
    BALANCE_FLAGS. Raises BenchError if no worker shows it."""
    for run in range(BALANCE_RUNS):
        served.stream(random_requests(sizes.streams, sizes.streams_len[0], BALANCE_OUTPUT, run), each_token=False)
    time.sleep(COUNTED_S / 5)  # until the last intervals are counted
    return counted(served.fullest_rank, "no worker of this layout moves experts")


def until_next_token(times: Sequence[float], killed_s: float) -> float:
    """Returns the seconds from the kill to the end of the longest gap that ends behind it: tokens that were on their
    way came before. Raises BenchError if nothing came."""
    gaps = [(later - at, later) for at, later in pairwise(times) if later > killed_s]
    if not gaps:
        raise BenchError("nothing came when the rank was killed")
    return max(gaps)[1] - killed_s
