"""What a finished exchange says: when tokens came, how many, or why not. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from blockyard.services.bench.load import http_response
from blockyard.services.bench.load.http_response import BadResponse, TimedReads

DONE = b"[DONE]"


class ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    role: str | None = None

    @property
    def is_opening(self) -> bool:
        """Says who speaks, and nothing yet."""
        said = self.content or self.reasoning_content or self.reasoning or self.tool_calls
        return self.role is not None and not said


class ChunkChoice(msgspec.Struct):
    text: str | None = None
    delta: ChunkDelta | None = None
    finish_reason: str | None = None

    @property
    def is_closing(self) -> bool:
        """Says how it ended, and nothing else."""
        if self.finish_reason is None or self.text:
            return False
        delta = self.delta
        return delta is None or not (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class StreamChunk(msgspec.Struct):
    """What is read of a streamed chunk of either endpoint."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: msgspec.Raw = msgspec.Raw()  # null and nothing are no error
    stamp: float = 0.0  # Blockyard's `return_stamps`: when the worker's step ended, CLOCK_REALTIME


decode_chunk = msgspec.json.Decoder(StreamChunk).decode


class _ErrorText(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorText | str | None = None
    message: str = ""


@dataclass(slots=True)
class RequestResult:
    """One request. Times are the client's clock, in seconds."""

    sent_s: float
    ended_s: float  # the last token's time, or when it failed
    due_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list)  # when each event that carries tokens was whole
    asked_output: int = 0
    num_input: int | None = None  # as the server counted them; None: it did not say
    num_output: int | None = None
    failure: str = ""

    @property
    def output_tokens(self) -> int:
        """As the server counted them, else the number of events."""
        return len(self.tokens_s) if self.num_output is None else self.num_output


class FinishedExchange(Protocol):
    """What is read of an exchange."""

    due_s: float
    sent_s: float
    ended_s: float
    failure: str

    @property
    def pieces(self) -> TimedReads: ...


def read(ended: FinishedExchange, asked_output: int) -> RequestResult:
    """Every answer but 200, an error event, a stream without [DONE] and one without a token is a failure."""
    outcome = RequestResult(ended.sent_s, ended.ended_s, ended.due_s, asked_output=asked_output, failure=ended.failure)
    if outcome.failure:
        return outcome
    try:
        found = http_response.read(ended.pieces)
        if found.status != 200:
            outcome.failure = f"HTTP {found.status}: {error_text(found.body)}"
        else:
            _read_events(found.events(), outcome)
    except BadResponse as e:
        outcome.failure = str(e)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        outcome.failure = f"an event that is no chunk: {e}"
    return outcome


def _read_events(events: Iterable[tuple[float, bytes]], outcome: RequestResult) -> None:
    done, last_s = False, 0.0
    for at, data in events:
        if data == DONE:
            done = True
            continue
        chunk = decode_chunk(data)
        if bytes(chunk.error) not in (b"", b"null"):
            outcome.failure = f"error event: {error_text(data)}"
            return
        if chunk.usage is not None:
            outcome.num_input, outcome.num_output = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        if not chunk.choices:
            continue
        choice = chunk.choices[0]
        if choice.is_closing:
            last_s = at  # ends the request; whether a token came with it cannot be seen
        elif choice.delta is None or not choice.delta.is_opening:
            outcome.tokens_s.append(at)
    if not done:
        outcome.failure = "the stream broke off before [DONE]"
    elif outcome.tokens_s or last_s:
        outcome.tokens_s = outcome.tokens_s or [last_s]  # an answer that is nothing but its end
        outcome.ended_s = max(last_s, outcome.tokens_s[-1])
    else:
        outcome.failure = "the stream had no token"


def error_text(body: bytes) -> str:
    """The message of an error as OpenAI words it, else the beginning of what there is."""
    try:
        said = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode(errors="replace").strip() or "no text"
    text = said.error.message if isinstance(said.error, _ErrorText) else said.error
    return text or said.message or body[:200].decode(errors="replace")
