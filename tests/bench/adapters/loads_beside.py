"""The gaps of running streams while requests bring adapters from disk, to those while as many name a resident one."""

import itertools
from collections.abc import Sequence

from adapters.adapted_server import AdaptedServer
from rig import Row, median

from blockyard.services.bench.load.results import BenchError, RequestResult
from blockyard.services.bench.suite.measures import all_running, gaps_among
from blockyard.services.bench.suite.served import random_requests
from blockyard.shared.percentiles import percentile

HEAD_START_S, AFTER_S = 1.5, 1.5  # of the streams, before the first load and behind the last
PROBE_TOKENS = 64
MERGED = 0.1  # share of tokens that may come in one event with another
BEHIND_S = 1.0  # how late the last load may be


def measure(served: AdaptedServer) -> list[Row]:
    sizes = served.sizes
    num = round(sizes.loads_per_s * sizes.loads_s)
    served.first_token_s(0, seed=-1)
    requests = random_requests(sizes.num_streams, sizes.context, PROBE_TOKENS, seed=-2)
    probe = served.served.stream(requests, merged=MERGED)
    gap_s = median([gap for one in probe for gap in gaps_among(probe, one)])
    most = served.max_model_len - sizes.context
    num_tokens = min(round((HEAD_START_S + sizes.loads_s + AFTER_S) / gap_s), most)
    without = _p99_gap_ms(served, num_tokens, [served.names[0]] * num, seed=1000)
    # in turn, three times as many as host memory holds
    with_loads = _p99_gap_ms(served, num_tokens, [served.names[i % len(served.names)] for i in range(num)], seed=2000)
    text = f"{with_loads / without:.2f} times ({with_loads:.2f} to {without:.2f} ms; p50 alone {1e3 * gap_s:.2f} ms)"
    what = f"p99 ITL of {sizes.num_streams} other streams while {sizes.loads_per_s:g} adapters a second load"
    return [(f"{what}, to as many requests without loads", text, "1.15 times")]


def _p99_gap_ms(served: AdaptedServer, num_tokens: int, models: Sequence[str], seed: int) -> float:
    """Of the streams, while short requests name these models. Raises BenchError if those come late."""
    sizes = served.sizes
    requests = random_requests(sizes.num_streams, sizes.context, num_tokens, seed)
    requests += random_requests(len(models), sizes.num_prompt, 1, seed + 1)
    due_s = [0.0] * sizes.num_streams + [HEAD_START_S + i / sizes.loads_per_s for i in range(len(models))]
    found = served.served.stream(requests, due_s=due_s, models=[*[""] * sizes.num_streams, *models], merged=MERGED)
    streams, short = found[: sizes.num_streams], found[sizes.num_streams :]
    begin, end = min(one.sent_s for one in short), max(one.ended_s for one in short)
    p99 = percentile(_gaps_ms(streams, begin, end), 99)
    if end - max(one.sent_s for one in short) > BEHIND_S:
        rate = len(short) / (end - begin)
        raise BenchError(f"{rate:.1f} loads a second instead of {sizes.loads_per_s:g}; p99 ITL {p99:.2f} ms")
    return p99


def _gaps_ms(streams: Sequence[RequestResult], begin: float, end: float) -> list[float]:
    """Ascending: gaps in this time while all streams run. Raises BenchError if that is less than half of it."""
    first, last = all_running(streams)
    from_s, to_s = max(first, begin), min(last, end)
    if to_s - from_s < (end - begin) / 2:
        raise BenchError(f"all streams ran for {to_s - from_s:.1f} of {end - begin:.1f} s of loads")
    times = ([at for at in one.tokens_s if from_s <= at <= to_s] for one in streams)
    return sorted(1e3 * (later - earlier) for one in times for earlier, later in itertools.pairwise(one))
