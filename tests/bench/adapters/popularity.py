"""Many adapters whose popularity follows Zipf's law, of which few have a place, to as many requests of one adapter."""

import random
from collections.abc import Sequence
from itertools import accumulate

from adapters.adapted_server import AdaptedServer, ttft_s
from rig import Row, percentile

from blockyard.services.bench.load.results import RequestResult
from blockyard.services.bench.suite.served import random_requests


def measure(served: AdaptedServer) -> list[Row]:
    sizes, chosen = served.sizes, zipf(served.sizes.num_requests, served.sizes.num_popular)
    num_warm = 2 * sizes.most_running
    _run(served, chosen[:num_warm], seed=1)
    of_one = _rate(_run(served, [0] * len(chosen), seed=2))
    by_zipf = _run(served, chosen, seed=3)
    of_many = _rate(by_zipf)
    tenth = sizes.num_popular // 10
    rarest, commonest = (
        [1e3 * ttft_s(one) for one, adapter in zip(by_zipf, chosen, strict=True) if adapter in some]
        for some in (range(sizes.num_popular - tenth, sizes.num_popular), range(tenth))
    )
    what = f"{sizes.num_popular:,} adapters by Zipf's law, {sizes.num_places} places, {sizes.num_host} in host memory"
    what += f", {sizes.lengths[0]} / {sizes.lengths[1]}, {len(chosen):,} requests, {sizes.most_running} at a time"
    rate = f"{of_many / of_one:.2f} times ({of_many:,.0f} to {of_one:,.0f} tokens/s; {len({*chosen}):,} were named)"
    found = [(f"{what}: tokens/s to one adapter", rate, "0.75 times")]
    if rarest:
        p95s = percentile(rarest, 0.95), percentile(commonest, 0.95)
        text = f"{p95s[0] / p95s[1]:.2f} times ({p95s[0]:,.0f} to {p95s[1]:,.0f} ms; of {len(rarest)} and"
        found.append(("the same: p95 TTFT, rarest tenth to commonest", f"{text} {len(commonest):,})", "4 times"))
    return found


def zipf(num: int, num_adapters: int) -> list[int]:
    """Adapters of so many requests: adapter i is named in proportion to 1 / (1 + i)."""
    weights = list(accumulate(1 / (1 + i) for i in range(num_adapters)))
    return random.Random(0).choices(range(num_adapters), cum_weights=weights, k=num)


def _run(served: AdaptedServer, chosen: Sequence[int], seed: int) -> list[RequestResult]:
    sizes = served.sizes
    requests = random_requests(len(chosen), *sizes.lengths, seed)
    models = [served.names[adapter] for adapter in chosen]
    return served.served.stream(requests, each_token=False, models=models, max_concurrency=sizes.most_running)


def _rate(results: Sequence[RequestResult]) -> float:
    """Output tokens a second."""
    seconds = max(one.ended_s for one in results) - min(one.sent_s for one in results)
    return sum(one.output_tokens for one in results) / seconds
