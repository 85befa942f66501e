"""Metrics of `LLM.get_metrics`: counters, gauges and histograms with vLLM's class and metric names."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from blockyard.shared.ring_client.metrics.histogram import BucketCounts
from blockyard.shared.ring_client.metrics.member_counts import MemberCounts, scheduler_totals
from blockyard.shared.ring_client.metrics.meters import Meters
from blockyard.shared.ring_client.metrics.metric_families import (
    OF_CLIENT,
    OF_SCHEDULERS,
    Family,
    MetricKind,
    Source,
    labels,
    vllms_names,
)


@dataclass(slots=True)
class Metric:
    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    value: int


@dataclass(slots=True)
class Vector(Metric):
    """Counters by position. Scripts of vLLM import the class; no metric uses it yet."""

    values: list[int]


@dataclass(slots=True)
class Gauge(Metric):
    value: float


@dataclass(slots=True)
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # by upper bound, "+Inf" last; cumulative as in Prometheus


def snapshot(meters: Meters, counts: MemberCounts) -> list[Metric]:
    """Returns the metrics of this process and of the schedulers of its ring."""
    return [*_metrics(OF_CLIENT, meters, meters), *_metrics(OF_SCHEDULERS, scheduler_totals(counts.members()), meters)]


def _metrics(families: Iterable[Family[Source]], source: Source, meters: Meters) -> Iterator[Metric]:
    for family in families:
        for name in vllms_names(family):
            for sample in family.samples(source):
                yield _metric(family.kind, f"vllm:{name}", labels(meters, sample), sample.value)


def _metric(kind: MetricKind, name: str, labels: dict[str, str], value: float | BucketCounts) -> Metric:
    if isinstance(value, BucketCounts):
        return Histogram(name, labels, value.count, value.total, dict(value.buckets(finer=False)))
    return Gauge(name, labels, float(value)) if kind is MetricKind.GAUGE else Counter(name, labels, int(value))
