"""Outputs and errors of the offline API, with vLLM's names, and their construction from a request's frames."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from blockyard.services.offline.adapters.requests import LoRARequest
from blockyard.services.offline.answers import AnswerReading, CompletionToolCall, ParsedAnswer
from blockyard.shared.errors import BlockyardError
from blockyard.shared.messages import FinishReason, TextDelta, TextLogprobs
from blockyard.shared.output_parsing.parts import Part
from blockyard.shared.ring_client.choice_reader import ChoiceReader
from blockyard.shared.ring_client.journal import ChoiceLog, JournalEntry
from blockyard.shared.ring_client.request_fields.choices import best
from blockyard.shared.token_ids import unpack

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.REPETITION: "repetition"}


@dataclass(slots=True)
class Logprob:
    """One candidate at one position."""

    logprob: float
    rank: int | None  # 1 is the most likely
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
    finish_reason: str | None = None  # "stop", "length" or "repetition"
    stop_reason: int | str | None = None  # the stop id or string; None for end-of-sequence
    # as --tool-call-parser and --reasoning-parser read the text of a chat's answer, which stays whole in `text`
    content: str | None = None  # without a parser all text
    reasoning: str | None = None
    tool_calls: list[CompletionToolCall] = field(default_factory=list)
    lora_request: LoRARequest | None = None  # of the adapter that generated it

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a prompt. `..._ts` are seconds of `time.monotonic`, the others of `time.time`."""

    arrival_time: float  # when `generate` or `chat` was called
    queued_ts: float  # when the scheduler accepted it
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
    """The output of one prompt."""

    request_id: str
    prompt: str | None  # None if only ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # None for the first token
    num_cached_tokens: int = 0
    finished: bool = False
    metrics: RequestMetrics | None = None
    kv_transfer_params: dict[str, Any] | None = None  # of the connector of KV transfers
    lora_request: LoRARequest | None = None  # of its adapter


class GenerationError(BlockyardError, RuntimeError):
    """Raised when some prompts failed. `outputs` has None for them, and `failures` has their reasons by index."""

    def __init__(self, failures: Mapping[int, Exception], outputs: list[RequestOutput | None]) -> None:
        first = min(failures)
        more = f" ({len(failures) - 1} more of {len(outputs)} prompts failed)" if len(failures) > 1 else ""
        super().__init__(f"prompts[{first}]: {failures[first]}{more}")
        self.failures = dict(failures)
        self.outputs = outputs


class RingLost(BlockyardError, RuntimeError):
    """Raised when the ring is closed or has ended unexpectedly."""


class OutputCollector:
    """Collects the text and log-probabilities of one choice: the sink of its journal entry."""

    def __init__(self, add_tokens: Callable[[int], None], detokenize: bool, reader: ChoiceReader | None = None) -> None:
        """`add_tokens` is called with the number of new tokens, for the progress bar."""
        self._add_tokens, self._detokenize, self._reader = add_tokens, detokenize, reader
        self.parts: list[Part] = []  # with a reader
        self.first_s = self.last_s = 0.0  # when its first and last tokens arrived; 0 before the first
        self.num_tokens = 0
        self.text: list[str] = []
        self.logprobs: list[TextLogprobs] = []
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def push(self, delta: TextDelta, now: float, stamp_s: float) -> None:
        if delta.token_ids:
            self._add_tokens(len(delta.token_ids))
            self.num_tokens += len(delta.token_ids)
            self.first_s, self.last_s = self.first_s or now, now
        if self._detokenize:
            self.text.append(delta.text)
        if self._reader is not None:
            self.parts += self._reader.push(delta)
        self.logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            self.finish, self.stop_reason = delta.finish, delta.stop_reason


@dataclass(frozen=True, slots=True)
class ArrivalTimes:
    """The time of a call by `time.time` and by the clock of its sinks."""

    time: float
    clock_s: float


class ShownLogprobs(NamedTuple):
    """The candidates of each position."""

    num_top: int
    are_likeliest: bool = True  # False: those of `logprob_token_ids`, whose ranks are unknown


def request_output(
    entry: JournalEntry,
    prompt: str | None,
    count: int,
    num_logprobs: int | None,
    arrival: ArrivalTimes,
    queued_s: float,
    reading: AnswerReading | None = None,
    lora_request: LoRARequest | None = None,
) -> RequestOutput:
    """Builds the output of an entry from its `count` best choices. Their sinks are OutputCollectors."""
    pairs = [(choice, choice.sink) for choice in entry.choices if isinstance(choice.sink, OutputCollector)]
    chosen = best(pairs, [sink.logprobs for _, sink in pairs], count)
    num_prompt_logprobs = entry.request.sampling.num_prompt_logprobs
    shown = None if num_logprobs is None else ShownLogprobs(num_logprobs, not entry.request.sampling.logprob_token_ids)
    of_prompt: list[PositionLogprobs | None] | None = None
    if num_prompt_logprobs is not None:
        of_prompt = [None, *(_position_logprobs(t, ShownLogprobs(num_prompt_logprobs)) for t in entry.prompt_logprobs)]
    return RequestOutput(
        request_id=entry.request_id,
        prompt=prompt,
        prompt_token_ids=unpack(entry.request.prompt_ids),
        outputs=[
            _completion_output(i, choice, sink, shown, reading, lora_request) for i, (choice, sink) in enumerate(chosen)
        ],
        prompt_logprobs=of_prompt,
        num_cached_tokens=entry.cached_tokens,
        finished=entry.num_open == 0,
        metrics=_metrics([sink for _, sink in pairs], arrival, queued_s),
        kv_transfer_params=msgspec.json.decode(connector) if (connector := entry.kv_transfer_params) else None,
        lora_request=lora_request,
    )


def _metrics(sinks: list[OutputCollector], arrival: ArrivalTimes, queued_s: float) -> RequestMetrics:
    started = [sink for sink in sinks if sink.first_s]
    first = min((sink.first_s for sink in started), default=queued_s)
    return RequestMetrics(
        arrival_time=arrival.time,
        queued_ts=queued_s,
        first_token_ts=first,
        last_token_ts=max((sink.last_s for sink in started), default=first),
        first_token_latency=first - arrival.clock_s,
        num_generation_tokens=sum(sink.num_tokens for sink in sinks),
    )


def _completion_output(
    index: int,
    choice: ChoiceLog,
    sink: OutputCollector,
    shown: ShownLogprobs | None,
    reading: AnswerReading | None,
    lora_request: LoRARequest | None,
) -> CompletionOutput:
    text = "".join(sink.text)
    answer = ParsedAnswer(text) if reading is None else reading.answer(sink.parts)
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=choice.output_ids.tolist(),
        cumulative_logprob=sum(t.logprob for t in sink.logprobs) if shown is not None else None,
        logprobs=[_position_logprobs(t, shown) for t in sink.logprobs] if shown is not None else None,
        finish_reason=REASONS.get(sink.finish) if sink.finish is not None else None,
        stop_reason=sink.stop_reason,
        content=answer.content,
        reasoning=answer.reasoning,
        tool_calls=answer.tool_calls,
        lora_request=lora_request,
    )


def _position_logprobs(token: TextLogprobs, shown: ShownLogprobs) -> PositionLogprobs:
    """Returns the token itself, then its candidates."""
    out = {token.token_id: Logprob(token.logprob, token.rank, _decode(token.token))}
    candidates = zip(token.top_ids[: shown.num_top], token.top_tokens, token.top_logprobs, strict=False)
    for rank, (token_id, text, logprob) in enumerate(candidates, start=1):
        out.setdefault(token_id, Logprob(logprob, rank if shown.are_likeliest else None, _decode(text)))
    return out


def _decode(token: bytes) -> str:
    return token.decode("utf-8", "replace")
