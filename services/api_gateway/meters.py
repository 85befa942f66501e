"""What a gateway counts. Plain integers and lists: an observation costs a tenth of a microsecond."""

from bisect import bisect_left
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

from blockyard.services.api_gateway.journal import Entry
from blockyard.shared.messages import FinishReason

TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
ITL_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
E2E_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.FAILED: "error",
}


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus has them."""
        out, seen = [], 0
        for bound, count in zip([*map(str, map(float, self.bounds)), "+Inf"], self.counts, strict=True):
            seen += count
            out.append((bound, float(seen)))
        return out


class Meters:
    """Counters since start, and their Prometheus form (prometheus_client calls `collect`)."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name  # the first served name; set once a scheduler has joined
        self.requests = 0  # HTTP requests that reached the ring
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.resent = 0
        self.ended = dict.fromkeys(FinishReason, 0)
        self.responses: dict[str, int] = {}  # HTTP status -> answers
        self.ttft = Histogram(TTFT_S)
        self.itl = Histogram(ITL_S)
        self.e2e = Histogram(E2E_S)
        self.prompt_sizes = Histogram(TOKENS)
        self.output_sizes = Histogram(TOKENS)
        self.first_token = self.ttft.observe
        self.between_tokens = self.itl.observe

    def opened(self, entries: list[Entry]) -> None:
        self.requests += 1
        for entry in entries:
            self.prompt_tokens += entry.num_prompt_tokens
            self.prompt_sizes.observe(entry.num_prompt_tokens)

    def closed(self, entries: list[Entry], took_s: float) -> None:
        self.e2e.observe(took_s)
        for entry in entries:
            self.output_sizes.observe(sum(len(c.output_ids) for c in entry.choices))

    def choice_ended(self, finish: FinishReason) -> None:
        self.ended[finish] += 1

    def responded(self, status: int) -> None:
        self.responses[str(status)] = self.responses.get(str(status), 0) + 1

    def collect(self) -> Iterator[Metric]:
        model = [self.model_name]
        for name, text, value in (
            ("requests", "Generation requests that were sent into the ring", self.requests),
            ("prompt_tokens", "Prompt tokens", self.prompt_tokens),
            ("generation_tokens", "Generated tokens", self.output_tokens),
            ("requests_resent", "Requests sent again after a member was lost or fell silent", self.resent),
        ):
            counter = CounterMetricFamily(f"blockyard:{name}", text, labels=["model_name"])
            counter.add_metric(model, value)
            yield counter
        ended = CounterMetricFamily(
            "blockyard:request_success", "Choices that ended, by reason", labels=["model_name", "finished_reason"]
        )
        for finish, count in self.ended.items():
            ended.add_metric([*model, REASONS[finish]], count)
        yield ended
        answers = CounterMetricFamily(
            "blockyard:http_responses", "HTTP answers by status", labels=["model_name", "status"]
        )
        for status, count in sorted(self.responses.items()):
            answers.add_metric([*model, status], count)
        yield answers
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From the prompt's ids to its first token", self.ttft),
            ("inter_token_latency_seconds", "Between two pieces of text of one choice", self.itl),
            ("e2e_request_latency_seconds", "From the HTTP request to its last token", self.e2e),
            ("request_prompt_tokens", "Prompt tokens of a prompt", self.prompt_sizes),
            ("request_generation_tokens", "Generated tokens of a prompt's choices", self.output_sizes),
        ):
            family = HistogramMetricFamily(f"blockyard:{name}", text, labels=["model_name"])
            family.add_metric(model, histogram.buckets(), histogram.total)
            yield family
