"""What schedulers say of their queues: who was refused and why, who was preempted, who was served how much."""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from blockyard.shared.messages import Role
from blockyard.shared.ring_client.member_counts import REFUSED, SERVED, Counted

LABELS = ["model_name", "member"]


def queue_families(members: Iterable[Counted], model_name: str) -> Iterator[Metric]:
    schedulers = [(one, [model_name, one.name]) for one in members if one.role is Role.SCHEDULER]
    yield from _gauges([(one, labels) for one, labels in schedulers if one.ready is not None])
    refused = CounterMetricFamily(
        "blockyard:requests_refused", "Requests that were refused, by reason", labels=[*LABELS, "reason"]
    )
    preempted = CounterMetricFamily("blockyard:preemptions", "Preemptions, by mode", labels=[*LABELS, "mode"])
    served = CounterMetricFamily(
        "blockyard:tenant_served_tokens", "Weighted tokens: prompt once, output twice", labels=[*LABELS, "tenant"]
    )
    for one, labels in schedulers:
        for reason, count in one.of(REFUSED):
            refused.add_metric([*labels, reason], count)
        mode = "swap" if one.stats.host_blocks_total else "recompute"
        displaced = one.count("displaced_total")
        preempted.add_metric([*labels, mode], one.count("preemptions_total") - displaced)
        preempted.add_metric([*labels, "displaced"], displaced)
        for tenant, count in one.of(SERVED):
            served.add_metric([*labels, tenant], count)
    yield from (refused, preempted, served)


def _gauges(schedulers: list[tuple[Counted, list[str]]]) -> Iterator[Metric]:
    tokens = GaugeMetricFamily("blockyard:queue_tokens", "Tokens of what waits", labels=LABELS)
    wait = GaugeMetricFamily(
        "blockyard:queue_wait_seconds", "Until what waits is served, by the measured rate", labels=LABELS
    )
    running = GaugeMetricFamily("blockyard:tenant_running", "Choices that run", labels=[*LABELS, "tenant"])
    waiting = GaugeMetricFamily("blockyard:tenant_waiting", "Choices that wait", labels=[*LABELS, "tenant"])
    for one, labels in schedulers:
        tokens.add_metric(labels, one.stats.waiting_tokens)
        wait.add_metric(labels, one.stats.wait_s)
        for share in one.stats.tenants:
            running.add_metric([*labels, share.tenant], share.running)
            waiting.add_metric([*labels, share.tenant], share.waiting)
    yield from (tokens, wait, running, waiting)
