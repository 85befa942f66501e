"""Metric families in prometheus_client's types: the gateways' and schedulers' families under vLLM's prefix, ours
or both, and one series per member under ours."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from blockyard.shared.config.services.gateway import MetricsNames
from blockyard.shared.messages import FIRST_MASK_S, Role, Stats
from blockyard.shared.ring_client.metrics.histogram import BucketCounts
from blockyard.shared.ring_client.metrics.member_counts import (
    FIRST_MASKS,
    FRAMES_DROPPED,
    REFUSED,
    SERVED,
    TRANSFER_BYTES,
    MemberTotals,
)
from blockyard.shared.ring_client.metrics.meters import Meters
from blockyard.shared.ring_client.metrics.metric_families import (
    Family,
    MetricKind,
    MetricSample,
    Source,
    labels,
    vllms_names,
)

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
# of a scheduler
_TRANSFER_GAUGES = (
    ("sequences_arriving", "Sequences whose KV blocks come from another worker", "arriving"),
    ("kv_transfers_open", "Transfers of KV blocks that have not ended on both workers", "transfers_open"),
    ("kv_blocks_quarantined", "KV blocks of aborted transfers that a worker may still use", "blocks_quarantined"),
)
_TRANSFER_COUNTERS = (
    ("kv_transfers_landed", "Transfers of KV blocks that are complete", "transfers_landed_total"),
    ("kv_transfers_aborted", "Transfers of KV blocks that were aborted", "transfers_aborted_total"),
    ("kv_transfer_blocks_failed", "KV blocks that arrived with a wrong checksum", "transfer_blocks_failed_total"),
    (
        "kv_transfer_notices_dropped",
        "Frames of workers about transfers that are unknown, or that had ended",
        "transfer_notices_dropped_total",
    ),
    (
        "kv_transfer_audit_differences",
        "Transfers of which a worker and the scheduler knew different things",
        "transfer_audit_differences_total",
    ),
)
# of a worker
_STEP_TIMES = (
    ("worker_step_seconds", "Steps of a worker, from launch to completion without the wait for earlier ones", "step"),
    ("worker_launch_seconds", "Time that a worker's host took to launch a step", "launch"),
)
_MASK_COUNTERS = (
    ("constraint_masks", "Masks of structured output that were applied", "masks_total"),
    ("constraint_mask_waits", "Sequences left without a token by a step: their mask was late", "mask_waits_total"),
    ("matcher_restarts", "Processes that make masks and were started again", "matcher_restarts_total"),
)
_EXPERT_LOADS: tuple[tuple[str, str, Callable[[Stats], list[float]]], ...] = (
    (
        "expert_load",
        "Tokens of a layer's most loaded expert over the mean of its experts, lately",
        lambda stats: stats.expert_loads,
    ),
    (
        "expert_rank_load",
        "Pairs of token and expert of a layer's fullest rank over the mean of ranks, in the last interval",
        lambda stats: stats.expert_rank_loads,
    ),
)
_EXPERT_COUNTERS = (
    ("expert_samples", "Steps of a mixture of experts whose choices were counted", "expert_samples_total"),
    ("experts_hit", "Experts of all layers that the counted steps chose at least once", "experts_hit_total"),
    (
        "experts_hit_if_even",
        "Experts that the counted steps would have chosen on average if all were chosen equally often",
        "experts_hit_if_even_total",
    ),
    ("experts_moved", "Experts that have moved to another rank", "experts_moved_total"),
)
_LABELS = ["model_name", "member", "role", "kv_role"]  # the last one only of workers with KV transfers
_QUEUE = ["model_name", "member"]


def expose(families: Iterable[Family[Source]], source: Source, meters: Meters, names: MetricsNames) -> Iterator[Metric]:
    for family in families:
        samples = family.samples(source)
        if names is not MetricsNames.BLOCKYARD:
            for name in vllms_names(family):
                yield _family(f"vllm:{name}", family, samples, meters, finer=False)
        if names is not MetricsNames.VLLM:
            yield _family(f"blockyard:{family.name}", family, samples, meters, finer=True)


def _family(name: str, family: Family[Source], samples: list[MetricSample], meters: Meters, finer: bool) -> Metric:
    keys = list(labels(meters, samples[0])) if samples else []
    if family.kind is MetricKind.HISTOGRAM:
        histograms = HistogramMetricFamily(name, family.help, labels=keys)
        for sample in samples:
            assert isinstance(sample.value, BucketCounts)
            buckets = [(limit, float(count)) for limit, count in sample.value.buckets(finer)]
            histograms.add_metric(list(labels(meters, sample).values()), buckets, sample.value.total)
        return histograms
    kind = CounterMetricFamily if family.kind is MetricKind.COUNTER else GaugeMetricFamily
    numbers = kind(name, family.help, labels=keys)
    for sample in samples:
        assert not isinstance(sample.value, BucketCounts)
        numbers.add_metric(list(labels(meters, sample).values()), sample.value)
    return numbers


def member_families(members: Iterable[MemberTotals], model_name: str) -> Iterator[Metric]:
    """One series per member, under our prefix only: vLLM has no such members."""
    counted = list(members)
    present = [(one, _member_labels(one, model_name)) for one in counted if one.ready is not None]
    for name, text, field in _GAUGES:
        gauge = GaugeMetricFamily(f"blockyard:{name}", text, labels=_LABELS)
        for one, values in present:
            gauge.add_metric(values, getattr(one.stats, field))
        yield gauge
    streams = GaugeMetricFamily("blockyard:open_streams", "Choices whose text has not ended", labels=_LABELS)
    ready = GaugeMetricFamily("blockyard:member_ready", "1 for a member that serves", labels=_LABELS)
    for one, values in present:
        ready.add_metric(values, float(bool(one.ready)))
        if one.role in TEXT_ROLES:
            streams.add_metric(values, one.stats.running)
    yield streams
    yield ready
    for name, text, field in _COUNTERS:
        counter = CounterMetricFamily(f"blockyard:{name}", text, labels=_LABELS)
        for one in counted:
            counter.add_metric(_member_labels(one, model_name), one.count(field))
        yield counter
    yield from _queue_families(counted, model_name)
    yield from _transfer_families(counted, model_name)
    yield from _rank_families(counted, model_name)
    yield from _step_families(counted, model_name)
    yield from _mask_families(counted, model_name)
    yield from _expert_families(counted, model_name)


def _member_labels(one: MemberTotals, model_name: str) -> list[str]:
    return [model_name, one.name, one.role.value, *([one.kv_role.value] if one.kv_role is not None else [])]


def _queue_families(members: Iterable[MemberTotals], model_name: str) -> Iterator[Metric]:
    """The schedulers' queues: refusals by reason, preemptions by mode, tokens served by tenant."""
    schedulers = [(one, [model_name, one.name]) for one in members if one.role is Role.SCHEDULER]
    yield from _queue_gauges([(one, values) for one, values in schedulers if one.ready is not None])
    refused = CounterMetricFamily(
        "blockyard:requests_refused", "Requests that were refused, by reason", labels=[*_QUEUE, "reason"]
    )
    preempted = CounterMetricFamily("blockyard:preemptions", "Preemptions, by mode", labels=[*_QUEUE, "mode"])
    served = CounterMetricFamily(
        "blockyard:tenant_served_tokens", "Weighted tokens: prompt once, output twice", labels=[*_QUEUE, "tenant"]
    )
    for one, values in schedulers:
        for reason, count in one.of(REFUSED):
            refused.add_metric([*values, reason], count)
        mode = "swap" if one.stats.host_blocks_total else "recompute"
        displaced = one.count("displaced_total")
        preempted.add_metric([*values, mode], one.count("preemptions_total") - displaced)
        preempted.add_metric([*values, "displaced"], displaced)
        for tenant, count in one.of(SERVED):
            served.add_metric([*values, tenant], count)
    yield from (refused, preempted, served)


def _queue_gauges(schedulers: list[tuple[MemberTotals, list[str]]]) -> Iterator[Metric]:
    tokens = GaugeMetricFamily("blockyard:queue_tokens", "Tokens of what waits", labels=_QUEUE)
    wait = GaugeMetricFamily(
        "blockyard:queue_wait_seconds", "Until what waits is served, by the measured rate", labels=_QUEUE
    )
    running = GaugeMetricFamily("blockyard:tenant_running", "Choices that run", labels=[*_QUEUE, "tenant"])
    waiting = GaugeMetricFamily("blockyard:tenant_waiting", "Choices that wait", labels=[*_QUEUE, "tenant"])
    for one, values in schedulers:
        tokens.add_metric(values, one.stats.waiting_tokens)
        wait.add_metric(values, one.stats.wait_s)
        for share in one.stats.tenants:
            running.add_metric([*values, share.tenant], share.running)
            waiting.add_metric([*values, share.tenant], share.waiting)
    yield from (tokens, wait, running, waiting)


def _step_families(members: Iterable[MemberTotals], model_name: str) -> Iterator[Metric]:
    """Times of steps with prefill and without. Where launches take as long as steps, the worker waits for its host."""
    workers = [(one, [model_name, one.name]) for one in members if one.role is Role.GPU_WORKER]
    for name, text, what in _STEP_TIMES:
        times = SummaryMetricFamily(f"blockyard:{name}", text, labels=[*_QUEUE, "kind"])
        for one, values in workers:
            prefills = one.count("prefill_steps_total")
            for kind, count in (("prefill", prefills), ("decode", one.count("steps_total") - prefills)):
                times.add_metric([*values, kind], count, one.count(f"{kind}_{what}_us_total") / 1e6)
        yield times


def _mask_families(members: Iterable[MemberTotals], model_name: str) -> Iterator[Metric]:
    """Structured output: masks of workers, and grammars that tokenizers refused."""
    workers = [(one, [model_name, one.name]) for one in members if one.role is Role.GPU_WORKER]
    for name, text, field in _MASK_COUNTERS:
        counter = CounterMetricFamily(f"blockyard:{name}", text, labels=_QUEUE)
        for one, values in workers:
            counter.add_metric(values, one.count(field))
        yield counter
    text = "From the start of a constrained sequence on a worker to its first mask"
    times = HistogramMetricFamily("blockyard:constraint_first_mask_seconds", text, labels=_QUEUE)
    for one, values in workers:
        counts = BucketCounts(FIRST_MASK_S)
        of_buckets = ((int(bucket), count) for bucket, count in one.of(FIRST_MASKS))
        counts.add(of_buckets, one.count("first_mask_us_total") / 1e6)
        buckets = [(limit, float(count)) for limit, count in counts.buckets(finer=False)]
        times.add_metric(values, buckets, counts.total)
    yield times
    text = "Grammars that tokenizers refused: invalid (or beyond the limits of a check), busy (too many waited)"
    refused = CounterMetricFamily("blockyard:grammars_refused", text, labels=[*_QUEUE, "reason"])
    for one in members:
        if one.role is Role.TOKENIZER_POOL:
            for reason, count in one.of(REFUSED):
                refused.add_metric([model_name, one.name, reason], count)
    yield refused


def _expert_families(members: Iterable[MemberTotals], model_name: str) -> Iterator[Metric]:
    """Mixtures of experts, as their workers sample them."""
    workers = [(one, [model_name, one.name]) for one in members if one.role is Role.GPU_WORKER]
    for name, text, field in _EXPERT_COUNTERS:
        counter = CounterMetricFamily(f"blockyard:{name}", text, labels=_QUEUE)
        for one, values in workers:
            counter.add_metric(values, one.count(field))
        yield counter
    for name, text, loads_of in _EXPERT_LOADS:
        load = GaugeMetricFamily(f"blockyard:{name}", text, labels=[*_QUEUE, "layer"])
        worst = GaugeMetricFamily(f"blockyard:{name}_worst", f"The largest {name} of any layer", labels=_QUEUE)
        for one, values in workers:
            if one.ready is not None and (loads := loads_of(one.stats)):
                for layer, value in enumerate(loads):
                    load.add_metric([*values, str(layer)], value)
                worst.add_metric(values, max(loads))
        yield from (load, worst)


def _rank_families(members: Iterable[MemberTotals], model_name: str) -> Iterator[Metric]:
    """The processes of workers with several ranks."""
    names = [*_QUEUE, "rank", "pid"]
    held = GaugeMetricFamily("blockyard:rank_resident_bytes", "Resident memory of a rank", labels=names)
    silent = GaugeMetricFamily("blockyard:rank_silent_seconds", "Time since a rank's last sign of life", labels=names)
    for one in members:
        for rank in one.stats.ranks if one.ready is not None else ():
            values = [model_name, one.name, str(rank.rank), str(rank.pid)]
            held.add_metric(values, rank.rss_bytes)
            silent.add_metric(values, rank.silent_s)
    yield from (held, silent)


def _transfer_families(members: Iterable[MemberTotals], model_name: str) -> Iterator[Metric]:
    """KV transfers as schedulers count them, and bytes and refused frames as workers do."""
    schedulers = [(one, [model_name, one.name]) for one in members if one.role is Role.SCHEDULER]
    workers = [(one, [model_name, one.name, one.kv_role.value]) for one in members if one.kv_role is not None]
    for name, text, field in _TRANSFER_GAUGES:
        gauge = GaugeMetricFamily(f"blockyard:{name}", text, labels=_QUEUE)
        for one, values in schedulers:
            if one.ready is not None:
                gauge.add_metric(values, getattr(one.stats, field))
        yield gauge
    for name, text, field in _TRANSFER_COUNTERS:
        counter = CounterMetricFamily(f"blockyard:{name}", text, labels=_QUEUE)
        for one, values in schedulers:
            counter.add_metric(values, one.count(field))
        yield counter
    for name, text, kind, label in (
        ("kv_transfer_bytes", "Bytes of KV blocks sent to other workers, by connector", TRANSFER_BYTES, "connector"),
        ("kv_transfer_frames_dropped", "Frames of other workers that were refused", FRAMES_DROPPED, "reason"),
    ):
        counter = CounterMetricFamily(f"blockyard:{name}", text, labels=[*_QUEUE, "kv_role", label])
        for one, values in workers:
            for what, count in one.of(kind):
                counter.add_metric([*values, what], count)
        yield counter
