"""The measurements of the suite's items. Each run uses new prompts, and the lengths of outputs are checked."""

import itertools
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from blockyard.services.bench import metrics
from blockyard.services.bench.datasets import RandomIds, SampleRequest
from blockyard.services.bench.latency_throughput import engine_keywords, timed
from blockyard.services.bench.load.results import BenchError, RequestResult
from blockyard.services.bench.suite.served import VOCAB, SuiteServer, random_requests, serve
from blockyard.services.offline.llm import LLM
from blockyard.shared.percentiles import Percentiles, percentile, percentiles_of

RUNS = 3
METRICS_S = 1.5  # until counters of the last steps are in the metrics
EVEN = (0.85, 1.1)  # experts that steps choose, of those that even routing would choose on average
MIN_EVENTS_A_TOKEN = 0.95  # least events per token: special tokens and parts of characters have no event


class Measurement(msgspec.Struct, frozen=True):
    """`value` is the median of `runs`, in the item's unit."""

    value: float
    runs: list[float]
    spreads: dict[str, Percentiles] = {}  # ms, over all runs
    experts: float | None = None  # that sampled steps chose, of those that even routing would; None: none were sampled
    launch_shares: dict[str, float] = {}  # of step time in which the host launched kernels, by kind of step


def with_counters(
    measure: Callable[[SuiteServer], Measurement], even_routing: bool
) -> Callable[[SuiteServer], Measurement]:
    """Adds what the workers counted: chosen experts, and the share of launches in the time of steps.

    Raises BenchError if `even_routing` is not what happened: floors assume it.
    """

    def measure_and_check(served: SuiteServer) -> Measurement:
        before = served.counters()
        found = measure(served)
        time.sleep(METRICS_S)
        after = served.counters()
        found = msgspec.structs.replace(found, launch_shares=after.launch_shares(before))
        if after.experts_hit_if_even <= before.experts_hit_if_even:
            return found
        share = (after.experts_hit - before.experts_hit) / (after.experts_hit_if_even - before.experts_hit_if_even)
        if even_routing and not EVEN[0] <= share <= EVEN[1]:
            raise BenchError(f"steps chose {share:.2f} times as many experts as with even routing")
        return msgspec.structs.replace(found, experts=share)

    return measure_and_check


class SuiteContext(msgspec.Struct, frozen=True):
    """The model and flags of an item, and the folder for its logs."""

    model: Path
    flags: tuple[str, ...]
    logs: Path
    has_started: bool = False  # whether a server of the model has filled the caches that outlive a start


def median_of(runs: Sequence[float], **spreads: Percentiles | None) -> Measurement:
    found = {name: one for name, one in spreads.items() if one is not None}
    return Measurement(percentile(sorted(runs), 50), list(runs), found)


def warm_up(served: SuiteServer, num: int = 1, num_input: int = 64, models: Sequence[str] = ()) -> None:
    """Triggers what happens on first use only."""
    served.stream(random_requests(num, num_input, 8, seed=-1), each_token=False, models=models)


def _streams(
    served: SuiteServer,
    lengths: tuple[int, int, int],
    value: Callable[[list[RequestResult]], float],
    each_token: bool = True,
    models: Sequence[str] = (),
) -> tuple[Measurement, list[RequestResult]]:
    """Runs `lengths` (streams, input tokens, output tokens) RUNS times; `value` is a run's figure."""
    num, num_input, num_output = lengths
    warm_up(served, num, num_input, models)
    runs, every = [], []
    for run in range(RUNS):
        results = served.stream(random_requests(num, num_input, num_output, seed=run), each_token, models=models)
        runs.append(value(results))
        every += results
    return median_of(runs, itl=_itl(every), ttft=_ttft(every)), every


def inter_token(
    num: int, num_input: int, num_output: int, models: Sequence[str] = ()
) -> Callable[[SuiteServer], Measurement]:
    """ms: p50 of the gaps between tokens of `num` streams while all of them run. models: as `SuiteServer.stream`."""

    def median_gap(results: list[RequestResult]) -> float:
        return percentile(sorted(1e3 * gap for one in results for gap in gaps_among(results, one)), 50)

    def measure(served: SuiteServer) -> Measurement:
        found, every = _streams(served, (num, num_input, num_output), median_gap, models=models)
        tpot = percentiles_of((t for one in every if (t := metrics.tpot_s(one)) is not None), 1000)
        return found if tpot is None else msgspec.structs.replace(found, spreads=found.spreads | {"tpot": tpot})

    return measure


def gaps_among(results: Sequence[RequestResult], one: RequestResult) -> list[float]:
    """Returns the gaps of `one` in seconds, while all of `results` are between their first and last token."""
    begin, end = all_running(results)
    times = [at for at in one.tokens_s if begin <= at <= end]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def all_running(results: Sequence[RequestResult]) -> tuple[float, float]:
    """Returns the times of the latest first token and the earliest last token. Raises BenchError if that is no span."""
    begin, end = max(one.tokens_s[0] for one in results), min(one.tokens_s[-1] for one in results)
    if begin >= end:
        raise BenchError(f"the {len(results)} streams never ran all at once")
    return begin, end


def rate_while_all_run(num: int, num_input: int, num_output: int) -> Callable[[SuiteServer], Measurement]:
    """Tokens/s of `num` streams between the latest first token and the earliest last token."""

    def rate(results: list[RequestResult]) -> float:
        begin, end = all_running(results)
        return sum(begin < at <= end for one in results for at in one.tokens_s) / (end - begin)

    return lambda served: _streams(served, (num, num_input, num_output), rate)[0]


def first_token(num_input: int, models: Sequence[str] = ()) -> Callable[[SuiteServer], Measurement]:
    """ms from sending a prompt to its first token; each run is three prompts, one after another.

    There is no second token, so samples of chosen experts are of prefills.
    """

    def measure(served: SuiteServer) -> Measurement:
        warm_up(served, 1, num_input, models)
        requests = [random_requests(1, num_input, 1, seed=i) for i in range(3 * RUNS)]
        return _median_ttft([served.stream(one, models=models)[0] for one in requests])

    return measure


def cached_first_token(num_cached: int, num_new: int) -> Callable[[SuiteServer], Measurement]:
    """ms to the first token of a prompt with a cached prefix."""

    def measure(served: SuiteServer) -> Measurement:
        make_prompt, rng = RandomIds(*VOCAB), random.Random(0)
        prefix, num = make_prompt(rng, num_cached), num_cached + num_new
        requests = [SampleRequest(prefix + make_prompt(rng, num_new), num, 2) for _ in range(2 + 3 * RUNS)]
        # the first request fills the cache, the second warms up reading it
        return _median_ttft([served.stream([request])[0] for request in requests][2:])

    return measure


def _median_ttft(every: Sequence[RequestResult]) -> Measurement:
    times = [1e3 * metrics.ttft_s(one) for one in every]
    return median_of([percentile(sorted(times[i::RUNS]), 50) for i in range(RUNS)], ttft=_ttft(every))


def streamed_rate(
    num: int, num_input: int, num_output: int, models: Sequence[str] = ()
) -> Callable[[SuiteServer], Measurement]:
    """Output tokens/s over HTTP with an event per token, from sending the first request to the end of the last."""

    def rate(results: list[RequestResult]) -> float:
        num_events = sum(len(one.tokens_s) for one in results)
        if num_events < MIN_EVENTS_A_TOKEN * num * num_output:
            raise BenchError(f"{num_events:,} events for {num * num_output:,} tokens: not one for each")
        return num * num_output / (max(one.ended_s for one in results) - min(one.sent_s for one in results))

    return lambda served: _streams(served, (num, num_input, num_output), rate, each_token=False, models=models)[0]


def launch_to_first_token(context: SuiteContext) -> Measurement:
    """Seconds of several starts; the caches that outlive a start are filled by an unmeasured one, if need be."""
    runs, unmeasured = [], 0 if context.has_started else 1
    for run in range(unmeasured + RUNS):
        with serve(context.model, context.flags, context.logs / f"start-{run}.log") as served:
            result = served.stream(random_requests(1, 32, 2, seed=run))[0]
            runs.append(result.tokens_s[0] - served.launched_s)
    return median_of(runs[unmeasured:])


def launch_to_full_graphs(served: SuiteServer) -> Measurement:
    """Seconds from launch until the decode graphs of all sizes are captured."""
    return median_of([served.full_s])


def offline_rate(make_requests: Callable[[], list[SampleRequest]]) -> Callable[[SuiteContext], Measurement]:
    """Output tokens/s of one `LLM.generate` with all prompts."""

    def measure(context: SuiteContext) -> Measurement:
        requests = make_requests()
        with offline_llm(context) as llm:
            timed(llm, random_requests(8, 64, 8, seed=-1), show_bar=False)
            seconds = timed(llm, requests, show_bar=False)
        return median_of([sum(request.num_output for request in requests) / seconds])

    return measure


def cost_of_the_ring(num: int, num_input: int, num_output: int) -> Callable[[SuiteContext], Measurement]:
    """The server's tokens/s divided by `LLM.generate`'s, for the same requests."""

    def measure(context: SuiteContext) -> Measurement:
        with serve(context.model, context.flags, context.logs / "cost.log") as served:
            streamed = streamed_rate(num, num_input, num_output)(served)
        rates = []
        with offline_llm(context) as llm:
            timed(llm, random_requests(num, num_input, 8, seed=-1), show_bar=False)
            for run in range(RUNS):
                requests = random_requests(num, num_input, num_output, seed=run)
                rates.append(num * num_output / timed(llm, requests, show_bar=False))
        return median_of([a / b for a, b in zip(sorted(streamed.runs), sorted(rates), strict=True)])

    return measure


def offline_llm(context: SuiteContext) -> LLM:
    keywords, _ = engine_keywords(context.flags)
    return LLM(context.model, load_format="dummy", **keywords)


def _itl(every: Sequence[RequestResult]) -> Percentiles | None:
    return percentiles_of((gap for one in every for gap in metrics.gaps_s(one)), 1000)


def _ttft(every: Sequence[RequestResult]) -> Percentiles | None:
    return percentiles_of((metrics.ttft_s(one) for one in every), 1000)
