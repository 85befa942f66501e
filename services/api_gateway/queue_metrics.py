"""What schedulers say of their queues: who was refused and why, who was preempted, who was served how much."""

from collections.abc import Iterable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from blockyard.shared.messages import Member, Role

LABELS = ["model_name", "member"]


def queue_families(members: Iterable[Member], model_name: str) -> Iterator[Metric]:
    tokens = GaugeMetricFamily("blockyard:queue_tokens", "Tokens of what waits", labels=LABELS)
    wait = GaugeMetricFamily(
        "blockyard:queue_wait_seconds", "Until what waits is served, by the measured rate", labels=LABELS
    )
    refused = CounterMetricFamily(
        "blockyard:requests_refused", "Requests that were refused, by reason", labels=[*LABELS, "reason"]
    )
    preempted = CounterMetricFamily("blockyard:preemptions", "Preemptions, by mode", labels=[*LABELS, "mode"])
    running = GaugeMetricFamily("blockyard:tenant_running", "Choices that run", labels=[*LABELS, "tenant"])
    waiting = GaugeMetricFamily("blockyard:tenant_waiting", "Choices that wait", labels=[*LABELS, "tenant"])
    served = CounterMetricFamily(
        "blockyard:tenant_served_tokens", "Weighted tokens: prompt once, output twice", labels=[*LABELS, "tenant"]
    )
    for m in members:
        if m.role is not Role.SCHEDULER:
            continue
        labels, stats = [model_name, m.name], m.stats
        tokens.add_metric(labels, stats.waiting_tokens)
        wait.add_metric(labels, stats.wait_s)
        for one in stats.refused:
            refused.add_metric([*labels, one.reason], one.total)
        mode = "swap" if stats.host_blocks_total else "recompute"
        preempted.add_metric([*labels, mode], stats.preemptions_total - stats.displaced_total)
        preempted.add_metric([*labels, "displaced"], stats.displaced_total)
        for share in stats.tenants:
            running.add_metric([*labels, share.tenant], share.running)
            waiting.add_metric([*labels, share.tenant], share.waiting)
            served.add_metric([*labels, share.tenant], share.served)
    yield from (tokens, wait, refused, preempted, running, waiting, served)
