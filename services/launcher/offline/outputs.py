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
class RequestOutput:
    """One prompt's answer."""

    request_id: str
    prompt: str | None  # None where ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # the first token has none
    num_cached_tokens: int = 0
    finished: bool = False
