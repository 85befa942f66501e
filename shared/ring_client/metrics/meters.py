"""Counters of a ring client: its requests with their tokens and times.

member_counts.py has the schedulers' counters, metric_families.py the names of all metrics.
"""

from collections import Counter

from blockyard.shared.messages import FinishReason, ModelCard
from blockyard.shared.ring_client.journal import ChoiceLog, JournalEntry
from blockyard.shared.ring_client.metrics.histogram import BucketCounts, one_two_five
from blockyard.shared.ring_client.open_entry import OpenEntry

_SECONDS = (1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, *_SECONDS, 160.0, 640.0, 2560.0)
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, *_SECONDS)
FINER_TOKEN_S = (0.0005, 0.001, 0.002, 0.005)
_MINUTES = (60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, *_MINUTES)
FINER_REQUEST_S = (0.001, 0.005, 0.02, 0.05, 0.1)
NUM_CHOICES = (1, 2, 5, 10, 20)
MOST_TOKENS = 50_000_000  # longer than any context; buckets beyond the model's length are not shown

REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
    FinishReason.FAILED: "error",
    FinishReason.REPETITION: "repetition",
}


class Meters:
    """Counters since start. As in vLLM each choice of a request counts as one, but prompt tokens once a prompt."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name  # the first served name; set once a scheduler has joined
        self.requests = 0  # HTTP requests that reached the ring
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.resent = 0
        self.ended = dict.fromkeys(FinishReason, 0)
        self.responses: dict[str, int] = {}  # HTTP status -> answers
        self.tokenizing = BucketCounts(TTFT_S)
        self.ttft = BucketCounts(TTFT_S)
        self.itl = BucketCounts(TOKEN_S, FINER_TOKEN_S)
        self.tpot = BucketCounts(TOKEN_S, FINER_TOKEN_S)
        self.e2e, self.queueing, self.prefill, self.decode, self.inference = (
            BucketCounts(REQUEST_S, FINER_REQUEST_S) for _ in range(5)
        )
        sizes = [BucketCounts(one_two_five(MOST_TOKENS)) for _ in range(5)]
        self.prompt_sizes, self.computed_sizes, self.output_sizes, self.longest_sizes, self.max_tokens = self._sizes = (
            sizes
        )
        self.num_choices = BucketCounts(NUM_CHOICES)
        self.tokenized = self.tokenizing.observe
        self.between_tokens = self.itl.observe

    def request_opened(self) -> None:
        self.requests += 1

    def add_output_tokens(self, num_tokens: int) -> None:
        self.output_tokens += num_tokens

    def request_resent(self) -> None:
        self.resent += 1

    def serves(self, card: ModelCard) -> None:
        """A model joined: sets the model name of all series and the largest bucket of lengths."""
        self.model_name = self.model_name or card.names[0]
        for histogram in self._sizes:
            histogram.set_max_value(card.max_model_len)

    def first_token(self, entry: JournalEntry, now: float) -> None:
        self.ttft.observe(now - entry.arrived_s)
        if entry.first_output():
            self.prompt_tokens += entry.num_prompt_tokens

    def ended_early(self, num_choices: int, finish: FinishReason) -> None:
        """Counts choices that the client aborted or that failed."""
        self.ended[finish] += num_choices

    def choice_ended(self, entry: JournalEntry, choice: ChoiceLog, finish: FinishReason, now: float) -> None:
        self.ended[finish] += 1
        hides, first_s = entry.hides_output, choice.first_s or now
        num_tokens = 0 if hides else len(choice.output_ids)
        decode_s = now - first_s
        prefill_s = max(0.0, first_s - entry.opened_s - choice.queued_s)
        self.e2e.observe(now - entry.arrived_s)
        self.queueing.observe(choice.queued_s)
        self.prefill.observe(prefill_s)
        self.decode.observe(decode_s)
        self.inference.observe(prefill_s + decode_s)
        self.tpot.observe(decode_s / (num_tokens - 1) if num_tokens > 1 else 0.0)
        self.prompt_sizes.observe(entry.num_prompt_tokens)
        self.computed_sizes.observe(entry.num_prompt_tokens - entry.cached_tokens)
        self.output_sizes.observe(num_tokens)
        self.max_tokens.observe(0 if hides else entry.request.sampling.max_tokens)
        if entry.num_open == 0:
            self.longest_sizes.observe(0 if hides else max(len(one.output_ids) for one in entry.choices))
            self.num_choices.observe(entry.num_returned)

    def texts_pooled(self, entry: OpenEntry, lengths: list[int], queued_s: float, now: float) -> None:
        """Counts texts that have their results. lengths: their tokens."""
        self.ended[FinishReason.STOP] += len(lengths)
        self.prompt_tokens += sum(lengths)
        e2e_s, since_s = now - entry.arrived_s, now - entry.opened_s
        for histogram, value in (
            (self.e2e, e2e_s),
            (self.queueing, queued_s),
            (self.prefill, max(0.0, since_s - queued_s)),
            (self.inference, max(0.0, since_s - queued_s)),
        ):
            histogram.observe_many(value, len(lengths))
        for length, count in Counter(lengths).items():
            self.prompt_sizes.observe_many(length, count)

    def responded(self, status: int) -> None:
        self.responses[str(status)] = self.responses.get(str(status), 0) + 1
