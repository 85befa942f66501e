"""What a client of the ring counts. Plain integers and lists: an observation costs a tenth of a microsecond."""

from bisect import bisect_left

from blockyard.shared.messages import FinishReason
from blockyard.shared.ring_client.journal import Entry

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
    """Counters since start."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name  # the first served name; set once a scheduler has joined
        self.requests = 0  # HTTP requests that reached the ring
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.resent = 0
        self.ended = dict.fromkeys(FinishReason, 0)
        self.responses: dict[str, int] = {}  # HTTP status -> answers
        self.tokenizing = Histogram(TTFT_S)
        self.ttft = Histogram(TTFT_S)
        self.itl = Histogram(ITL_S)
        self.e2e = Histogram(E2E_S)
        self.prompt_sizes = Histogram(TOKENS)
        self.output_sizes = Histogram(TOKENS)
        self.tokenized = self.tokenizing.observe
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
