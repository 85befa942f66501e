"""A gateway's counters in their Prometheus form."""

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

from blockyard.shared.ring_client.meters import REASONS, Meters


class MeterFamilies:
    """prometheus_client calls `collect`."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def collect(self) -> Iterator[Metric]:
        meters = self._meters
        model = [meters.model_name]
        for name, text, value in (
            ("requests", "Generation requests that were sent into the ring", meters.requests),
            ("prompt_tokens", "Prompt tokens", meters.prompt_tokens),
            ("generation_tokens", "Generated tokens", meters.output_tokens),
            ("requests_resent", "Requests sent again after a member was lost or fell silent", meters.resent),
        ):
            counter = CounterMetricFamily(f"blockyard:{name}", text, labels=["model_name"])
            counter.add_metric(model, value)
            yield counter
        ended = CounterMetricFamily(
            "blockyard:request_success", "Choices that ended, by reason", labels=["model_name", "finished_reason"]
        )
        for finish, count in meters.ended.items():
            ended.add_metric([*model, REASONS[finish]], count)
        yield ended
        answers = CounterMetricFamily(
            "blockyard:http_responses", "HTTP answers by status", labels=["model_name", "status"]
        )
        for status, count in sorted(meters.responses.items()):
            answers.add_metric([*model, status], count)
        yield answers
        for name, text, histogram in (
            (
                "tokenize_seconds",
                "From the HTTP request to the ids of its prompts: waiting and work",
                meters.tokenizing,
            ),
            ("time_to_first_token_seconds", "From the HTTP request to a prompt's first token", meters.ttft),
            ("inter_token_latency_seconds", "Between two pieces of text of one choice", meters.itl),
            ("e2e_request_latency_seconds", "From the HTTP request to its last token", meters.e2e),
            ("request_prompt_tokens", "Prompt tokens of a prompt", meters.prompt_sizes),
            ("request_generation_tokens", "Generated tokens of a prompt's choices", meters.output_sizes),
        ):
            family = HistogramMetricFamily(f"blockyard:{name}", text, labels=["model_name"])
            family.add_metric(model, histogram.buckets(), histogram.total)
            yield family
