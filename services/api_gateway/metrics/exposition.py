"""Metric families in their Prometheus form, under vLLM's prefix, ours, or both."""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from blockyard.shared.config.gateway import MetricsNames
from blockyard.shared.ring_client.histogram import Histogram
from blockyard.shared.ring_client.meters import Meters
from blockyard.shared.ring_client.metric_families import Family, Kind, Sample, Source, labels, vllms_names


def expose(families: Iterable[Family[Source]], source: Source, meters: Meters, names: MetricsNames) -> Iterator[Metric]:
    for family in families:
        samples = family.samples(source)
        if names is not MetricsNames.BLOCKYARD:
            for name in vllms_names(family):
                yield _family(f"vllm:{name}", family, samples, meters, finer=False)
        if names is not MetricsNames.VLLM:
            yield _family(f"blockyard:{family.name}", family, samples, meters, finer=True)


def _family(name: str, family: Family[Source], samples: list[Sample], meters: Meters, finer: bool) -> Metric:
    keys = list(labels(meters, samples[0])) if samples else []
    if family.kind is Kind.HISTOGRAM:
        histograms = HistogramMetricFamily(name, family.help, labels=keys)
        for sample in samples:
            assert isinstance(sample.value, Histogram)
            buckets = [(limit, float(count)) for limit, count in sample.value.buckets(finer)]
            histograms.add_metric(list(labels(meters, sample).values()), buckets, sample.value.total)
        return histograms
    kind = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    numbers = kind(name, family.help, labels=keys)
    for sample in samples:
        assert not isinstance(sample.value, Histogram)
        numbers.add_metric(list(labels(meters, sample).values()), sample.value)
    return numbers
