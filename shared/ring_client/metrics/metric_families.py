"""The metric families of a gateway's /metrics and of `LLM.get_metrics`.

Names, labels and buckets are vLLM's if it has the family.
"""

import enum
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from blockyard.shared.ring_client.metrics.histogram import BucketCounts
from blockyard.shared.ring_client.metrics.member_counts import SchedulerTotals
from blockyard.shared.ring_client.metrics.meters import REASONS, Meters

ENGINE = "0"  # vLLM's label of the data-parallel replica: the whole ring counts as one


class MetricKind(enum.Enum):
    COUNTER = enum.auto()
    GAUGE = enum.auto()
    HISTOGRAM = enum.auto()


@dataclass(frozen=True, slots=True)
class MetricSample:
    value: float | BucketCounts
    labels: tuple[tuple[str, str], ...] = ()  # besides model_name and engine


Source = TypeVar("Source")


@dataclass(frozen=True, slots=True)
class Family(Generic[Source]):
    name: str  # without prefix, and without a counter's suffix `_total`
    help: str
    kind: MetricKind
    read: Callable[[Source], float | BucketCounts | list[MetricSample]]
    former: str = ""  # an older name of vLLM's that dashboards still use
    ours: bool = False  # vLLM has none

    def samples(self, source: Source) -> list[MetricSample]:
        found = self.read(source)
        return found if isinstance(found, list) else [MetricSample(found)]


def _by_reason(meters: Meters) -> list[MetricSample]:
    return [MetricSample(count, (("finished_reason", REASONS[finish]),)) for finish, count in meters.ended.items()]


def _by_status(meters: Meters) -> list[MetricSample]:
    return [MetricSample(count, (("status", status),)) for status, count in sorted(meters.responses.items())]


def _waiting_by_reason(totals: SchedulerTotals) -> list[MetricSample]:
    counts = {"capacity": totals.waiting - totals.arriving, "deferred": totals.arriving}
    return [MetricSample(count, (("reason", reason),)) for reason, count in counts.items()]


def _adapter_uses(totals: SchedulerTotals) -> list[MetricSample]:
    """As vLLM's, the value is the time and the labels say the rest."""
    found = {
        (
            ("max_lora", str(one.num_places)),
            ("waiting_lora_adapters", ",".join(one.waiting)),
            ("running_lora_adapters", ",".join(one.running)),
        )
        for one in totals.adapter_uses
    }
    return [MetricSample(time.time(), labels) for labels in sorted(found)]


OF_CLIENT: tuple[Family[Meters], ...] = (
    Family("requests", "Requests that were sent into the ring.", MetricKind.COUNTER, lambda m: m.requests, ours=True),
    Family("requests_resent", "Requests sent again after a loss.", MetricKind.COUNTER, lambda m: m.resent, ours=True),
    Family("http_responses", "HTTP answers by status.", MetricKind.COUNTER, _by_status, ours=True),
    Family(
        "tokenize_seconds",
        "From a request to the ids of its prompts: waiting and work.",
        MetricKind.HISTOGRAM,
        lambda m: m.tokenizing,
        ours=True,
    ),
    Family("prompt_tokens", "Prompt tokens of requests with output.", MetricKind.COUNTER, lambda m: m.prompt_tokens),
    Family("generation_tokens", "Generated tokens.", MetricKind.COUNTER, lambda m: m.output_tokens),
    Family("request_success", "Choices that ended, by reason.", MetricKind.COUNTER, _by_reason),
    Family("time_to_first_token_seconds", "From a request to its first token.", MetricKind.HISTOGRAM, lambda m: m.ttft),
    Family(
        "inter_token_latency_seconds",
        "Between two pieces of text of a choice.",
        MetricKind.HISTOGRAM,
        lambda m: m.itl,
        former="time_per_output_token_seconds",
    ),
    Family(
        "request_time_per_output_token_seconds",
        "Mean time between a choice's tokens.",
        MetricKind.HISTOGRAM,
        lambda m: m.tpot,
    ),
    Family("e2e_request_latency_seconds", "From a request to its last token.", MetricKind.HISTOGRAM, lambda m: m.e2e),
    Family(
        "request_queue_time_seconds",
        "From the scheduler's queue to a place in a batch.",
        MetricKind.HISTOGRAM,
        lambda m: m.queueing,
    ),
    Family(
        "request_prefill_time_seconds",
        "From a place in a batch to the first token.",
        MetricKind.HISTOGRAM,
        lambda m: m.prefill,
    ),
    Family(
        "request_decode_time_seconds", "From the first token to the last.", MetricKind.HISTOGRAM, lambda m: m.decode
    ),
    Family("request_inference_time_seconds", "Prefill and decode time.", MetricKind.HISTOGRAM, lambda m: m.inference),
    Family("request_prompt_tokens", "Prompt tokens.", MetricKind.HISTOGRAM, lambda m: m.prompt_sizes),
    Family(
        "request_prefill_kv_computed_tokens",
        "Prompt tokens that were not found in the prefix cache.",
        MetricKind.HISTOGRAM,
        lambda m: m.computed_sizes,
    ),
    Family(
        "request_generation_tokens", "Generated tokens of a choice.", MetricKind.HISTOGRAM, lambda m: m.output_sizes
    ),
    Family(
        "request_max_num_generation_tokens",
        "Generated tokens of a prompt's longest choice.",
        MetricKind.HISTOGRAM,
        lambda m: m.longest_sizes,
    ),
    Family("request_params_max_tokens", "max_tokens of requests.", MetricKind.HISTOGRAM, lambda m: m.max_tokens),
    Family("request_params_n", "n of requests.", MetricKind.HISTOGRAM, lambda m: m.num_choices),
)

OF_SCHEDULERS: tuple[Family[SchedulerTotals], ...] = (
    Family("num_requests_running", "Choices in the batches.", MetricKind.GAUGE, lambda s: s.running),
    Family("num_requests_waiting", "Choices that wait in the scheduler.", MetricKind.GAUGE, lambda s: s.waiting),
    Family(
        "num_requests_waiting_by_reason",
        "Choices that wait: for a place in a batch (capacity), or for KV blocks from another worker (deferred).",
        MetricKind.GAUGE,
        _waiting_by_reason,
    ),
    Family(
        "kv_cache_usage_perc",
        "Share of KV blocks in use, 0 to 1.",
        MetricKind.GAUGE,
        lambda s: s.blocks_used / s.blocks_total if s.blocks_total else 0.0,
        former="gpu_cache_usage_perc",
    ),
    Family(
        "lora_requests_info",
        "LoRA adapters of requests that run and that wait; the value is the time, in seconds since the epoch.",
        MetricKind.GAUGE,
        _adapter_uses,
    ),
    Family("num_preemptions", "Preemptions.", MetricKind.COUNTER, lambda s: s.preemptions),
    Family(
        "prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        MetricKind.COUNTER,
        lambda s: s.prefix_queries,
        former="gpu_prefix_cache_queries",
    ),
    Family(
        "prefix_cache_hits",
        "Tokens found in the prefix cache.",
        MetricKind.COUNTER,
        lambda s: s.prefix_hits,
        former="gpu_prefix_cache_hits",
    ),
    Family(
        "iteration_tokens_total",
        "Tokens of a step: of prompts computed plus generated.",
        MetricKind.HISTOGRAM,
        lambda s: s.step_tokens,
    ),
    Family(
        "second_token_seconds",
        "From the first to the second token of a sequence that a prefill group has handed over.",
        MetricKind.HISTOGRAM,
        lambda s: s.second_tokens,
        ours=True,
    ),
)


def vllms_names(family: Family[Source]) -> Iterator[str]:
    """Yields the names, without prefix, that scripts and dashboards for vLLM use."""
    if not family.ours:
        yield family.name
        if family.former:
            yield family.former


def labels(meters: Meters, sample: MetricSample) -> dict[str, str]:
    return {"model_name": meters.model_name, "engine": ENGINE, **dict(sample.labels)}
