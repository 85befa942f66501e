"""What the offline API returns, in the shape users of this field know."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """One candidate at one position."""

    logprob: float
    rank: int | None  # 1 is the likeliest
    decoded_token: str | None


PositionLogprobs = dict[int, Logprob]  # by token id


@dataclass(slots=True)
class CompletionOutput:
    """One of the `n` continuations of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None  # "stop" or "length"
    stop_reason: int | str | None = None  # the stop id or string; None for end-of-sequence

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When what happened to a prompt. `..._ts` are seconds of `time.monotonic`, the others of `time.time`."""

    arrival_time: float  # when `generate` or `chat` was called
    queued_ts: float  # when the scheduler took it
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float  # seconds from the call to the first token
    num_generation_tokens: int  # of all choices

    @property
    def first_token_time(self) -> float:
        return self.arrival_time + self.first_token_latency

    @property
    def last_token_time(self) -> float:
        return self.first_token_time + self.last_token_ts - self.first_token_ts

    @property
    def finished_time(self) -> float:
        return self.last_token_time


@dataclass(slots=True)
class RequestOutput:
    """One prompt's answer."""

    request_id: str
    prompt: str | None  # None where ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # the first token has none
    num_cached_tokens: int = 0
    finished: bool = False
    metrics: RequestMetrics | None = None
