"""What the items of the suite measure. Prompts are new in each run; lengths are checked."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from blockyard.services.bench import metrics
from blockyard.services.bench.datasets import RandomIds, SampleRequest
from blockyard.services.bench.latency_throughput import timed
from blockyard.services.bench.load.results import RequestResult
from blockyard.services.bench.server import BenchError
from blockyard.services.bench.suite.served import VOCAB, SuiteServer, random_requests, serve
from blockyard.services.offline.llm import LLM
from blockyard.shared.spread import Spread, percentile, spread

RUNS = 3
EVENTS = 0.95  # of a token's, at least: special tokens and parts of characters have none


class Measurement(msgspec.Struct, frozen=True):
    """`value` is the median of `runs`, in the item's unit."""

    value: float
    runs: list[float]
    spreads: dict[str, Spread] = {}  # ms, all runs in one pool


class SuiteContext(msgspec.Struct, frozen=True):
    """What an item is run with."""

    model: Path
    flags: tuple[str, ...]
    logs: Path


def median_of(runs: Sequence[float], **spreads: Spread | None) -> Measurement:
    return Measurement(
        percentile(sorted(runs), 50),
        list(runs),
        {name: one for name, one in spreads.items() if one is not None},
    )


def warm_up(served: SuiteServer, num: int = 1, num_input: int = 64) -> None:
    """What happens once, happens now."""
    served.stream(random_requests(num, num_input, 8, seed=-1), each_token=False)


def inter_token(num: int, num_input: int, num_output: int) -> Callable[[SuiteServer], Measurement]:
    """ms: p50 of all gaps between tokens of `num` streams, all running at once."""

    def measure(served: SuiteServer) -> Measurement:
        warm_up(served, num, num_input)
        runs, every = [], []
        for run in range(RUNS):
            outcomes = served.stream(random_requests(num, num_input, num_output, seed=run))
            gaps = [1e3 * gap for one in outcomes for gap in gaps_among(outcomes, one)]
            runs.append(percentile(sorted(gaps), 50))
            every += outcomes
        return median_of(runs, itl=_itl(every), tpot=_tpot(every), ttft=_ttft(every))

    return measure


def gaps_among(outcomes: Sequence[RequestResult], one: RequestResult) -> list[float]:
    """The gaps of `one` in seconds while all of `outcomes` had a first token and none its last."""
    begin, end = all_running(outcomes)
    times = [at for at in one.tokens_s if begin <= at <= end]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def all_running(outcomes: Sequence[RequestResult]) -> tuple[float, float]:
    """When the last of them had its first token, and the first its last. Raises BenchError if that is no time."""
    begin, end = max(one.tokens_s[0] for one in outcomes), min(one.tokens_s[-1] for one in outcomes)
    if begin >= end:
        raise BenchError(f"the {len(outcomes)} streams never ran all at once")
    return begin, end


def rate_while_all_run(num: int, num_input: int, num_output: int) -> Callable[[SuiteServer], Measurement]:
    """Tokens/s of `num` streams from the last one's first token to the first one's last."""

    def measure(served: SuiteServer) -> Measurement:
        warm_up(served, num, num_input)
        runs, every = [], []
        for run in range(RUNS):
            outcomes = served.stream(random_requests(num, num_input, num_output, seed=run))
            begin, end = all_running(outcomes)
            runs.append(sum(begin < at <= end for one in outcomes for at in one.tokens_s) / (end - begin))
            every += outcomes
        return median_of(runs, itl=_itl(every), ttft=_ttft(every))

    return measure


def first_token(num_input: int) -> Callable[[SuiteServer], Measurement]:
    """ms from sending a prompt to its first token; each run is three prompts, one after the other."""

    def measure(served: SuiteServer) -> Measurement:
        warm_up(served, 1, num_input)
        every = [served.stream(random_requests(1, num_input, 2, seed=i))[0] for i in range(3 * RUNS)]
        times = [1e3 * metrics.ttft_s(one) for one in every]
        return median_of([percentile(sorted(times[i::RUNS]), 50) for i in range(RUNS)], ttft=_ttft(every))

    return measure


def cached_first_token(num_cached: int, num_new: int) -> Callable[[SuiteServer], Measurement]:
    """ms to the first token of a prompt whose beginning was computed before."""

    def measure(served: SuiteServer) -> Measurement:
        draw, rng = RandomIds(*VOCAB), random.Random(0)
        prefix, num = draw(rng, num_cached), num_cached + num_new
        asks = [SampleRequest(prefix + draw(rng, num_new), num, 2) for _ in range(2 + 3 * RUNS)]
        every = [served.stream([ask])[0] for ask in asks][2:]  # the first fills the cache, the second warms it up
        times = [1e3 * metrics.ttft_s(one) for one in every]
        return median_of([percentile(sorted(times[i::RUNS]), 50) for i in range(RUNS)], ttft=_ttft(every))

    return measure


def streamed_rate(num: int, num_input: int, num_output: int) -> Callable[[SuiteServer], Measurement]:
    """Output tokens/s over HTTP, an event a token, from the first request's sending to the last one's end."""

    def measure(served: SuiteServer) -> Measurement:
        warm_up(served, num, num_input)
        runs, every = [], []
        for run in range(RUNS):
            outcomes = served.stream(random_requests(num, num_input, num_output, seed=run), each_token=False)
            num_events = sum(len(one.tokens_s) for one in outcomes)
            if num_events < EVENTS * num * num_output:
                raise BenchError(f"{num_events:,} events for {num * num_output:,} tokens: not one for each")
            duration_s = max(one.ended_s for one in outcomes) - min(one.sent_s for one in outcomes)
            runs.append(num * num_output / duration_s)
            every += outcomes
        return median_of(runs, itl=_itl(every), ttft=_ttft(every))

    return measure


def launch_to_first_token(place: SuiteContext) -> Measurement:
    """Seconds, each of several starts; one before them fills what is kept between starts."""
    runs = []
    for run in range(1 + RUNS):
        with serve(place.model, place.flags, place.logs / f"start-{run}.log") as served:
            outcome = served.stream(random_requests(1, 32, 2, seed=run))[0]
            runs.append(outcome.tokens_s[0] - served.launched_s)
    return median_of(runs[1:])


def launch_to_full_graphs(served: SuiteServer) -> Measurement:
    """Seconds until decode steps of every size had their graph."""
    return median_of([served.full_s])


def offline_rate(make_asks: Callable[[], list[SampleRequest]]) -> Callable[[SuiteContext], Measurement]:
    """Output tokens/s of one `LLM.generate` with all prompts."""

    def measure(place: SuiteContext) -> Measurement:
        asks = make_asks()
        with _llm(place) as llm:
            timed(llm, random_requests(8, 64, 8, seed=-1), show_bar=False)
            seconds = timed(llm, asks, show_bar=False)
        return median_of([sum(ask.num_output for ask in asks) / seconds])

    return measure


def cost_of_the_ring(num: int, num_input: int, num_output: int) -> Callable[[SuiteContext], Measurement]:
    """Tokens/s of the server by those of the offline loop, the same requests."""

    def measure(place: SuiteContext) -> Measurement:
        with serve(place.model, place.flags, place.logs / "cost.log") as served:
            streamed = streamed_rate(num, num_input, num_output)(served)
        rates = []
        with _llm(place) as llm:
            timed(llm, random_requests(num, num_input, 8, seed=-1), show_bar=False)
            for run in range(RUNS):
                asks = random_requests(num, num_input, num_output, seed=run)
                rates.append(num * num_output / timed(llm, asks, show_bar=False))
        return median_of([a / b for a, b in zip(sorted(streamed.runs), sorted(rates), strict=True)])

    return measure


def _llm(place: SuiteContext) -> LLM:
    words = iter(place.flags)
    given: dict[str, object] = {}
    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        if name.startswith("no_"):
            given[name.removeprefix("no_")] = False
        else:
            given[name] = next(words)
    gateways = given.pop("api_gateways", None)
    assert gateways is None, "offline items have no gateways"
    return LLM(place.model, load_format="dummy", **_typed(given))


def _typed(given: Mapping[str, object]) -> dict[str, object]:
    return {name: int(v) if isinstance(v, str) and v.isdecimal() else v for name, v in given.items()}


def _itl(every: Sequence[RequestResult]) -> Spread | None:
    return spread((gap for one in every for gap in metrics.gaps_s(one)), 1000)


def _ttft(every: Sequence[RequestResult]) -> Spread | None:
    return spread((metrics.ttft_s(one) for one in every), 1000)


def _tpot(every: Sequence[RequestResult]) -> Spread | None:
    return spread((t for one in every if (t := metrics.tpot_s(one)) is not None), 1000)
