"""Turns a recorded exchange into a RequestResult: token times, token counts, or the reason of a failure. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from blockyard.services.bench.load import http_response
from blockyard.services.bench.load.http_response import BadResponse, TimedReads
from blockyard.shared.errors import BlockyardError

DONE = b"[DONE]"


class BenchError(BlockyardError):
    """The benchmark cannot run, or its result differs from the request."""


class ChunkDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    role: str | None = None

    @property
    def is_opening(self) -> bool:
        """Whether it has the role only: the first event of a chat stream, which carries no token."""
        said = self.content or self.reasoning_content or self.reasoning or self.tool_calls
        return self.role is not None and not said


class ChunkChoice(msgspec.Struct):
    text: str | None = None
    delta: ChunkDelta | None = None
    finish_reason: str | None = None

    @property
    def is_closing(self) -> bool:
        """Whether it has a finish reason and no text."""
        if self.finish_reason is None or self.text:
            return False
        delta = self.delta
        return delta is None or not (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class ChunkUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class StreamChunk(msgspec.Struct):
    """The fields read from a streamed chunk of the completions and chat endpoints."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: msgspec.Raw = msgspec.Raw()  # null and a missing field mean no error


decode_chunk = msgspec.json.Decoder(StreamChunk).decode


class WholeAnswer(msgspec.Struct):
    """The field read from an answer of a pooling model, which is not streamed."""

    usage: ChunkUsage


class _ErrorText(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorText | str | None = None
    message: str = ""


@dataclass(slots=True)
class RequestResult:
    """One request's measurements. Times are seconds of the client's clock."""

    sent_s: float
    ended_s: float  # time of the last token or of the failure
    due_s: float = 0.0
    tokens_s: list[float] = field(default_factory=list)  # time of each event that carries tokens
    asked_output: int = 0
    num_input: int | None = None  # the server's count; None if it sent no usage
    num_output: int | None = None
    failure: str = ""

    @property
    def output_tokens(self) -> int:
        """The server's count, or the number of events without one."""
        return len(self.tokens_s) if self.num_output is None else self.num_output

    def fail(self, reason: str) -> None:
        self.failure = reason

    def set_usage(self, usage: ChunkUsage) -> None:
        self.num_input, self.num_output = usage.prompt_tokens, usage.completion_tokens

    def end(self, last_s: float) -> None:
        """The stream is complete. `last_s`: time of its closing event, 0 without one."""
        if not self.tokens_s and not last_s:
            self.fail("the stream had no token")
            return
        self.tokens_s = self.tokens_s or [last_s]  # the stream has a closing event only
        self.ended_s = max(last_s, self.tokens_s[-1])


class FinishedExchange(Protocol):
    """The fields of an exchange that `read` uses."""

    due_s: float
    sent_s: float
    ended_s: float
    failure: str

    @property
    def pieces(self) -> TimedReads: ...


def read(ended: FinishedExchange, asked_output: int) -> RequestResult:
    """Failures: a status other than 200, an error event, a stream without [DONE], a stream without a token.

    A request without output is of a pooling model: its answer is whole, and its one event is the answer's end.
    """
    result = RequestResult(ended.sent_s, ended.ended_s, ended.due_s, asked_output=asked_output, failure=ended.failure)
    if result.failure:
        return result
    try:
        found = http_response.read(ended.pieces)
        if found.status != 200:
            result.fail(f"HTTP {found.status}: {error_text(found.body)}")
        elif asked_output:
            _read_events(found.events(), result)
        else:
            _read_whole(found, result)
    except BadResponse as e:
        result.fail(str(e))
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        result.fail(f"not a completion chunk, or not an answer of a pooling model: {e}")
    return result


def _read_whole(found: http_response.HttpResponse, result: RequestResult) -> None:
    if not found.complete:
        result.fail("the connection ended before the answer")
        return
    usage = msgspec.json.decode(found.body, type=WholeAnswer).usage
    result.set_usage(ChunkUsage(usage.prompt_tokens, 0))
    result.tokens_s.append(found.complete_at(len(found.body)))
    result.end(0.0)


def _read_events(events: Iterable[tuple[float, bytes]], result: RequestResult) -> None:
    done, last_s = False, 0.0
    for at, data in events:
        if data == DONE:
            done = True
            continue
        chunk = decode_chunk(data)
        if bytes(chunk.error) not in (b"", b"null"):
            result.fail(f"error event: {error_text(data)}")
            return
        if chunk.usage is not None:
            result.set_usage(chunk.usage)
        if not chunk.choices:
            continue
        choice = chunk.choices[0]
        if choice.is_closing:
            last_s = at  # ends the request; it may or may not carry a token
        elif choice.delta is None or not choice.delta.is_opening:
            result.tokens_s.append(at)
    if done:
        result.end(last_s)
    else:
        result.fail("the stream ended before [DONE]")


def error_text(body: bytes) -> str:
    """Returns the message of an OpenAI error body, or the beginning of any other body."""
    try:
        said = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body[:200].decode(errors="replace").strip() or "no text"
    text = said.error.message if isinstance(said.error, _ErrorText) else said.error
    return text or said.message or body[:200].decode(errors="replace")
