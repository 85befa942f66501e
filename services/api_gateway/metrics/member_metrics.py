"""What members of the ring count, a series a member. Names of ours: vLLM has no such members."""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from blockyard.services.api_gateway.metrics.queue_metrics import queue_families
from blockyard.shared.messages import Role
from blockyard.shared.ring_client.member_counts import Counted

TEXT_ROLES = (Role.API_GATEWAY, Role.DETOKENIZER)

# name, help, field of Stats
_GAUGES = (
    ("kv_blocks_used", "KV blocks in use", "blocks_used"),
    ("kv_blocks", "KV blocks", "blocks_total"),
    ("host_kv_blocks_used", "KV blocks in host memory that hold something", "host_blocks_used"),
    ("host_kv_blocks", "KV blocks in host memory", "host_blocks_total"),
    ("resident_bytes", "Resident memory", "rss_bytes"),
)
_COUNTERS = (
    ("steps", "Steps", "steps_total"),
    ("kv_blocks_saved", "KV blocks copied to host memory", "blocks_saved_total"),
    ("kv_blocks_fetched", "KV blocks copied back from host memory", "blocks_fetched_total"),
    ("malformed_frames", "Frames that did not decode", "malformed_total"),
)
_LABELS = ["model_name", "member", "role"]


def member_families(members: Iterable[Counted], model_name: str) -> Iterator[Metric]:
    counted = list(members)
    present = [(one, [model_name, one.name, one.role.value]) for one in counted if one.ready is not None]
    for name, text, field in _GAUGES:
        gauge = GaugeMetricFamily(f"blockyard:{name}", text, labels=_LABELS)
        for one, labels in present:
            gauge.add_metric(labels, getattr(one.stats, field))
        yield gauge
    streams = GaugeMetricFamily("blockyard:open_streams", "Choices whose text has not ended", labels=_LABELS)
    ready = GaugeMetricFamily("blockyard:member_ready", "1 for a member that serves", labels=_LABELS)
    for one, labels in present:
        ready.add_metric(labels, float(bool(one.ready)))
        if one.role in TEXT_ROLES:
            streams.add_metric(labels, one.stats.running)
    yield streams
    yield ready
    for name, text, field in _COUNTERS:
        counter = CounterMetricFamily(f"blockyard:{name}", text, labels=_LABELS)
        for one in counted:
            counter.add_metric([model_name, one.name, one.role.value], one.count(field))
        yield counter
    yield from queue_families(counted, model_name)
