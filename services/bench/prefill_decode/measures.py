"""Takes the figures of one running server. Prompts are random ids that share no prefix; output lengths are checked."""

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from blockyard.services.bench import metrics
from blockyard.services.bench.load.results import BenchError, RequestResult
from blockyard.services.bench.prefill_decode.deployments import PDItem
from blockyard.services.bench.suite.served import SuiteServer, random_requests
from blockyard.services.bench.workload import due_times
from blockyard.shared.percentiles import percentile

NUM_AFTER = 32  # tokens after the second one of a prompt alone: the median of their gaps is its ITL
MERGED = 0.02  # share of the tokens of streams beside prompts that may be in one event with others
LEAD_S = 2.0  # between the start of the streams and the first long prompt


Lengths = tuple[int, int]  # tokens of input and output


class PDSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers and lengths of the requests to send. Lengths are in tokens."""

    prompt: int = 8192  # length of the long prompts
    runs: int = 7  # prompts alone
    streams: int = 64
    stream_input: int = 256  # with `stream_output`, the mean context is 1,024
    stream_output: int = 1536
    prompts_per_s: float = 2.0
    num_prompts: int = 16  # long prompts beside the streams
    prompt_output: int = 8  # tokens that each asks for
    goodput_long: Lengths = (8192, 256)
    goodput_short: Lengths = (2048, 512)
    num_requests: int = 160  # of one trial
    rates: tuple[float, ...] = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0)  # requests a second, ascending
    ttft_limit_ms: float = 1000.0
    itl_limit_ms: float | None = None  # of goodput; None: all limits of the table


class Trial(msgspec.Struct, frozen=True):
    """A Poisson load at one rate. Its figures are the 99th percentiles, in ms."""

    rate: float
    ttft_ms: float
    itl_ms: float


class PDFigures(msgspec.Struct):
    """Figures of one server; None where an item was not asked for. Times are in ms."""

    ttft: float | None = None  # median of prompts alone
    second: float | None = None  # median of the time from their first to their second token
    itl: float | None = None  # median of the gaps after it
    one_token: float | None = None  # median TTFT of prompts that ask for one token
    stream_itl: float | None = None  # p99 of the streams without long prompts
    disturbed_itl: float | None = None  # p99 of the streams while long prompts arrive
    trials_long: list[Trial] = []
    trials_short: list[Trial] = []

    @property
    def exposed(self) -> float | None:
        """How much longer the second token takes than later ones."""
        return None if self.second is None or self.itl is None else self.second - self.itl


OnTrial = Callable[[Lengths, Trial], None]


def measure(
    served: SuiteServer, items: Collection[PDItem], sizes: PDSizes, on_trial: OnTrial = lambda lengths, trial: None
) -> PDFigures:
    """on_trial: called after each trial of goodput. Raises BenchError if a request fails or has another length."""
    figures = PDFigures()
    served.stream(random_requests(2, 64, 8, seed=-1), each_token=False)  # what happens on first use only
    if PDItem.TTFT in items or PDItem.CHECKSUMS in items:
        figures.ttft, figures.second, figures.itl = prompts_alone(served, sizes)
    if PDItem.ONE_TOKEN in items:
        figures.one_token = one_token(served, sizes)
    if PDItem.ITL in items:
        figures.stream_itl = stream_itl(served, sizes, num_prompts=0)
        figures.disturbed_itl = stream_itl(served, sizes, sizes.num_prompts)
    if PDItem.GOODPUT_LONG in items:
        figures.trials_long = trials(served, sizes, sizes.goodput_long, on_trial)
    if PDItem.GOODPUT_SHORT in items:
        figures.trials_short = trials(served, sizes, sizes.goodput_short, on_trial)
    return figures


def prompts_alone(served: SuiteServer, sizes: PDSizes) -> tuple[float, float, float]:
    """Medians over prompts, one after another: TTFT, first to second token, gaps after it. The first is not counted."""
    results = _one_by_one(served, sizes, 2 + NUM_AFTER)
    gaps = [metrics.gaps_s(one) for one in results]
    return (
        _median_ms(metrics.ttft_s(one) for one in results),
        _median_ms(of_one[0] for of_one in gaps),
        _median_ms(gap for of_one in gaps for gap in of_one[1:]),
    )


def one_token(served: SuiteServer, sizes: PDSizes) -> float:
    """Median TTFT of prompts that ask for one token, which is not handed over."""
    return _median_ms(metrics.ttft_s(one) for one in _one_by_one(served, sizes, 1))


def _one_by_one(served: SuiteServer, sizes: PDSizes, num_output: int) -> list[RequestResult]:
    requests = random_requests(1 + sizes.runs, sizes.prompt, num_output, seed=num_output)
    return [served.stream([request])[0] for request in requests][1:]


def stream_itl(served: SuiteServer, sizes: PDSizes, num_prompts: int) -> float:
    """p99 of the gaps of the streams while all run, and while long prompts arrive if there are any."""
    streams = random_requests(sizes.streams, sizes.stream_input, sizes.stream_output, seed=num_prompts)
    prompts = random_requests(num_prompts, sizes.prompt, sizes.prompt_output, seed=-2)
    due_s = [0.0] * len(streams) + [LEAD_S + i / sizes.prompts_per_s for i in range(num_prompts)]
    results = served.stream([*streams, *prompts], due_s=due_s, merged=MERGED)
    of_streams, of_prompts = results[: len(streams)], results[len(streams) :]
    begin = max([one.tokens_s[0] for one in of_streams] + [one.sent_s for one in of_prompts[:1]])
    end = min(one.tokens_s[-1] for one in of_streams)
    if of_prompts:
        end = min(end, max(one.ended_s for one in of_prompts))
    if begin >= end:
        raise BenchError("the streams ended before the long prompts arrived")
    gaps = [
        later - earlier
        for one in of_streams
        for earlier, later in itertools.pairwise(at for at in one.tokens_s if begin <= at <= end)
    ]
    return 1000 * percentile(sorted(gaps), 99)


def trials(served: SuiteServer, sizes: PDSizes, lengths: Lengths, on_trial: OnTrial) -> list[Trial]:
    """Loads at ascending rates, up to the first one whose TTFT, or ITL if there is one limit for it, is over that."""
    found: list[Trial] = []
    for rate in sizes.rates:
        seed = round(100 * rate)
        requests = random_requests(sizes.num_requests, *lengths, seed)
        results = served.stream(requests, due_s=due_times(len(requests), rate, 1.0, random.Random(seed)))
        ttfts = sorted(metrics.ttft_s(one) for one in results)
        gaps = sorted(gap for one in results for gap in metrics.gaps_s(one))
        found.append(Trial(rate, 1000 * percentile(ttfts, 99), 1000 * percentile(gaps, 99)))
        on_trial(lengths, found[-1])
        is_over = sizes.itl_limit_ms is not None and found[-1].itl_ms > sizes.itl_limit_ms
        if is_over or found[-1].ttft_ms > sizes.ttft_limit_ms:
            break
    return found


def goodput(found: Sequence[Trial], ttft_ms: float, itl_ms: float) -> float:
    """The highest rate within both limits; 0 if there is none."""
    return max((one.rate for one in found if one.ttft_ms <= ttft_ms and one.itl_ms <= itl_ms), default=0.0)


def _median_ms(seconds: Iterable[float]) -> float:
    return 1000 * percentile(sorted(seconds), 50)
