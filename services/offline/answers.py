"""What arrived for a prompt, as the output its caller gets."""

from dataclasses import dataclass
from typing import Protocol

from blockyard.services.offline.outputs import (
    CompletionOutput,
    Logprob,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)
from blockyard.shared.messages import FinishReason, TextDelta, TextLogprobs
from blockyard.shared.ring_client.recovery.journal import ChoiceLog, JournalEntry
from blockyard.shared.ring_client.request_fields.choices import best
from blockyard.shared.token_ids import unpack

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class TokenCount(Protocol):
    num_output_tokens: int


class OutputCollector:
    """A journal sink."""

    __slots__ = (
        "_count",
        "_detokenize",
        "finish",
        "first_s",
        "last_s",
        "logprobs",
        "num_tokens",
        "stop_reason",
        "text",
    )

    def __init__(self, count: TokenCount, detokenize: bool) -> None:
        self._count, self._detokenize = count, detokenize
        self.first_s = self.last_s = 0.0  # when its first and last tokens came; 0: none has
        self.num_tokens = 0
        self.text: list[str] = []
        self.logprobs: list[TextLogprobs] = []
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        if delta.token_ids:
            self._count.num_output_tokens += len(delta.token_ids)
            self.num_tokens += len(delta.token_ids)
            self.first_s, self.last_s = self.first_s or now, now
        if self._detokenize:
            self.text.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason


@dataclass(frozen=True, slots=True)
class ArrivalTimes:
    """When a call was made: `time.time`, and the same moment by the clock of its sinks."""

    time: float
    clock_s: float


def request_output(
    entry: JournalEntry,
    prompt: str | None,
    count: int,
    num_logprobs: int | None,
    arrival: ArrivalTimes,
    queued_s: float,
) -> RequestOutput:
    """The best `count` of an entry whose choices have all ended and whose sinks are OutputCollector."""
    pairs = [(choice, choice.sink) for choice in entry.choices if isinstance(choice.sink, OutputCollector)]
    chosen = best(pairs, [sink.logprobs for _, sink in pairs], count)
    num_prompt_logprobs = entry.sampling.num_prompt_logprobs
    of_prompt: list[PositionLogprobs | None] | None = None
    if num_prompt_logprobs is not None:
        of_prompt = [None, *(_position(t, num_prompt_logprobs) for t in entry.prompt_logprobs)]
    return RequestOutput(
        request_id=entry.request_id,
        prompt=prompt,
        prompt_token_ids=unpack(entry.prompt_ids),
        outputs=[_completion(i, choice, sink, num_logprobs) for i, (choice, sink) in enumerate(chosen)],
        prompt_logprobs=of_prompt,
        num_cached_tokens=entry.cached_tokens,
        finished=True,
        metrics=_metrics([sink for _, sink in pairs], arrival, queued_s),
    )


def _metrics(sinks: list[OutputCollector], arrival: ArrivalTimes, queued_s: float) -> RequestMetrics:
    came = [sink for sink in sinks if sink.first_s]
    first = min((sink.first_s for sink in came), default=queued_s)
    return RequestMetrics(
        arrival_time=arrival.time,
        queued_ts=queued_s,
        first_token_ts=first,
        last_token_ts=max((sink.last_s for sink in came), default=first),
        first_token_latency=first - arrival.clock_s,
        num_generation_tokens=sum(sink.num_tokens for sink in sinks),
    )


def _completion(index: int, choice: ChoiceLog, sink: OutputCollector, num_logprobs: int | None) -> CompletionOutput:
    asked = num_logprobs is not None
    return CompletionOutput(
        index=index,
        text="".join(sink.text),
        token_ids=choice.output_ids.tolist(),
        cumulative_logprob=sum(t.logprob for t in sink.logprobs) if asked else None,
        logprobs=[_position(t, num_logprobs) for t in sink.logprobs] if num_logprobs is not None else None,
        finish_reason=REASONS.get(sink.finish) if sink.finish is not None else None,
        stop_reason=sink.stop_reason,
    )


def _position(token: TextLogprobs, num_top: int) -> PositionLogprobs:
    """The token itself, then the likeliest candidates."""
    out = {token.token_id: Logprob(token.logprob, token.rank, _show(token.token))}
    candidates = zip(token.top_ids[:num_top], token.top_tokens, token.top_logprobs, strict=False)
    for rank, (token_id, text, logprob) in enumerate(candidates, start=1):
        out.setdefault(token_id, Logprob(logprob, rank, _show(text)))
    return out


def _show(token: bytes) -> str:
    return token.decode("utf-8", "replace")
