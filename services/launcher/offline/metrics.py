"""What `LLM.get_metrics` returns: counters, gauges and histograms under the names of vLLM's."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blockyard.shared.messages import Member, Role, Stats
from blockyard.shared.ring_client.meters import REASONS, Meters
from blockyard.shared.ring_client.meters import Histogram as Observed


@dataclass(slots=True)
class Metric:
    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    value: int


@dataclass(slots=True)
class Vector(Metric):
    """Counters by position. Scripts ask for the class; none of the metrics is one yet."""

    values: list[int]


@dataclass(slots=True)
class Gauge(Metric):
    value: float


@dataclass(slots=True)
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # by upper limit, "+Inf" the last; cumulative, as Prometheus has them


GAUGES = {"num_requests_running": "running", "num_requests_waiting": "waiting"}  # by field of the scheduler's Stats
COUNTERS = {
    "num_preemptions": "preemptions_total",
    "prefix_cache_queries": "prefix_queries_total",
    "prefix_cache_hits": "prefix_hits_total",
}


def snapshot(meters: Meters, members: Iterable[Member]) -> list[Metric]:
    """Of this process and the schedulers of its ring."""
    labels = {"model_name": meters.model_name, "engine": "0"}
    schedulers = [member.stats for member in members if member.role == Role.SCHEDULER]
    found: list[Metric] = [*_of_schedulers(schedulers, labels)]
    found.append(Counter("vllm:prompt_tokens", dict(labels), meters.prompt_tokens))
    found.append(Counter("vllm:generation_tokens", dict(labels), meters.output_tokens))
    for finish, count in meters.ended.items():
        found.append(Counter("vllm:request_success", labels | {"finished_reason": REASONS[finish]}, count))
    for name, observed in (
        ("time_to_first_token_seconds", meters.ttft),
        ("inter_token_latency_seconds", meters.itl),
        ("e2e_request_latency_seconds", meters.e2e),
        ("request_prompt_tokens", meters.prompt_sizes),
        ("request_generation_tokens", meters.output_sizes),
    ):
        found.append(_histogram(f"vllm:{name}", labels, observed))
    return found


def _of_schedulers(stats: list[Stats], labels: dict[str, str]) -> Iterator[Metric]:
    for name, field in GAUGES.items():
        yield Gauge(f"vllm:{name}", dict(labels), float(sum(getattr(one, field) for one in stats)))
    blocks = sum(one.blocks_total for one in stats)
    used = sum(one.blocks_used for one in stats)
    yield Gauge("vllm:kv_cache_usage_perc", dict(labels), used / blocks if blocks else 0.0)
    for name, field in COUNTERS.items():
        yield Counter(f"vllm:{name}", dict(labels), sum(getattr(one, field) for one in stats))


def _histogram(name: str, labels: dict[str, str], observed: Observed) -> Histogram:
    buckets = {bound: int(count) for bound, count in observed.buckets()}
    return Histogram(name, dict(labels), buckets["+Inf"], observed.total, buckets)
