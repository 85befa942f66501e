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
from blockyard.services.bench.prefill_decode.measures import PDSizes, prompts_alone, stream_itl
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
TEXT_FLAGS = ("--batch-invariant",)  # otherwise a sequence that goes on elsewhere may take another token in a tie
# mostly prompts: tokens of a stream with random weights repeat themselves, and so do their experts
BALANCE_OUTPUT = 16  # tokens of a stream
BALANCE_RUNS = 16  # of the prompts of several streams: four intervals or more
COUNTED_S = 5.0  # until the first counters of a worker are shown
STAGES = 2  # of the pipeline whose idle time is computed
# Share of a stream's tokens that may be in one event with others, as vLLM sent 246 for 256: gaps are medians.
MERGED = 0.1


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
    beside: int = 32  # streams beside prompts of `prompt` tokens, which come one a second
    beside_len: tuple[int, int] = (256, 1024)
    num_prompts: int = 12
    requests: int = 768
    requests_len: tuple[int, int] = (1000, 1000)
    killed_output: int = 256  # of the stream whose rank is killed
    kill_after: int = 20  # events of it
    texts: int = 16
    texts_len: tuple[int, int] = (32, 256)
    sums: tuple[int, ...] = (16 * KIB, 512 * KIB, KIB**2, 2 * KIB**2, 16 * KIB**2, 64 * KIB**2)  # bytes


def one_stream(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns p50 of the gaps between tokens of one stream."""
    return _gaps(served, sizes.runs, 1, *sizes.stream)


def some_streams(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns the same of several, while all of them run."""
    return _gaps(served, sizes.runs, sizes.streams, *sizes.streams_len)


def stage_streams(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns the same of as many as a stage has in a step, of all that run."""
    return _gaps(served, 1, sizes.many // STAGES, *sizes.many_len)


def first_token(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns the time from sending a prompt to its first token, the median of a few."""
    return _ttft(served, sizes.runs, sizes.prompt)


def first_token_long(served: SuiteServer, sizes: ParallelSizes) -> float:
    return _ttft(served, sizes.runs, sizes.long_prompt)


def rate(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns the tokens/s of many streams, while all of them run."""
    served.stream(random_requests(sizes.many, 64, 8, seed=-1), each_token=False)
    results = served.stream(random_requests(sizes.many, *sizes.many_len, seed=0))
    begin, end = all_running(results)
    return sum(begin < at <= end for one in results for at in one.tokens_s) / (end - begin)


def rate_of_all(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns the tokens/s of requests that are sent at once, from there to the end of the last one."""
    served.stream(random_requests(8, 64, 8, seed=-1), each_token=False)
    results = served.stream(random_requests(sizes.requests, *sizes.requests_len, seed=0), each_token=False)
    took_s = max(one.ended_s for one in results) - min(one.sent_s for one in results)
    return sizes.requests * sizes.requests_len[1] / took_s


def beside_prompts(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns p99 of the gaps of streams, while long prompts arrive."""
    served.stream(random_requests(2, sizes.prompt, 8, seed=-1), each_token=False)
    num_input, num_output = sizes.beside_len
    asked = PDSizes(
        prompt=sizes.prompt,
        prompts_per_s=1.0,
        prompt_output=2,  # the second is that of the decode worker
        streams=sizes.beside,
        stream_input=num_input,
        stream_output=num_output,
    )
    return stream_itl(served, asked, sizes.num_prompts)


def handover(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns how much later the second token of a prompt comes than others: the first is that of its prefill."""
    _, second, gap = prompts_alone(served, PDSizes(prompt=sizes.prompt, runs=sizes.runs))
    return second - gap


def kv_blocks(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns the number of KV blocks, of all schedulers. Raises BenchError if none are shown."""
    return counted(
        lambda: sum(one.stats.blocks_total for one in served.members() if one.role == Role.SCHEDULER),
        "no scheduler has KV blocks",
    )


def first_token_s(served: SuiteServer, sizes: ParallelSizes) -> float:
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


def equal_texts(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns the share of streams whose text is the same if the last rank is killed amid them.

    For a server with TEXT_FLAGS. Raises BenchError.
    """
    requests = random_requests(sizes.texts, *sizes.texts_len, seed=2)
    expected, pids = served.texts(requests), rank_pids(served)
    found = served.texts(requests, lambda: os.kill(pids[-1], signal.SIGKILL))
    if pids[-1] in rank_pids(served):
        raise BenchError("the rank was not killed")
    return sum(a == b for a, b in zip(expected, found, strict=True)) / len(expected)


def fullest_to_mean(served: SuiteServer, sizes: ParallelSizes) -> float:
    """Returns the load of the fullest rank over the mean once experts have moved, in the worst layer of a server with
    BALANCE_FLAGS. Raises BenchError if no worker shows it."""
    for run in range(BALANCE_RUNS):
        served.stream(random_requests(sizes.streams, sizes.streams_len[0], BALANCE_OUTPUT, run), each_token=False)
    time.sleep(COUNTED_S / 5)  # until the last intervals are counted
    return counted(served.fullest_rank, "no worker of this layout moves experts")


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


def until_next_token(times: Sequence[float], killed_s: float) -> float:
    """Returns the seconds from the kill to the end of the longest gap that ends behind it: tokens that were on their
    way came before. Raises BenchError if nothing came."""
    gaps = [(later - at, later) for at, later in pairwise(times) if later > killed_s]
    if not gaps:
        raise BenchError("nothing came when the rank was killed")
    return max(gaps)[1] - killed_s


def _gaps(served: SuiteServer, runs: int, num: int, num_input: int, num_output: int) -> float:
    served.stream(random_requests(num, num_input, 8, seed=-1), each_token=False)
    gaps: list[float] = []
    for run in range(runs):
        results = served.stream(random_requests(num, num_input, num_output, seed=run), merged=MERGED)
        gaps += [gap for one in results for gap in gaps_among(results, one)]
    return 1e3 * percentile(sorted(gaps), 50)


def _ttft(served: SuiteServer, runs: int, num_input: int) -> float:
    requests = [random_requests(1, num_input, 1, seed=run) for run in range(runs + 1)]
    times = [metrics.ttft_s(served.stream(one)[0]) for one in requests]
    return 1e3 * percentile(sorted(times[1:]), 50)
