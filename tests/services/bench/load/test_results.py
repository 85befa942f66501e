"""Results of a request from the events of its stream."""

from dataclasses import dataclass, field

import msgspec
import pytest

from blockyard.services.bench.load import results
from blockyard.services.bench.load.results import RequestResult

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"  # ended by the connection
USAGE = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}}


@dataclass
class FinishedExchange:
    pieces: list[tuple[float, bytes]]
    due_s: float = 0.0
    sent_s: float = 10.0
    ended_s: float = 99.0
    failure: str = field(default="")


def read(*events: object, head: bytes = HEAD) -> RequestResult:
    """The first event is whole at 11, the second at 12, and so on."""
    data = [e if isinstance(e, bytes) else b"data: %b\n\n" % msgspec.json.encode(e) for e in events]
    return results.read(FinishedExchange([(10.0, head), *((11.0 + i, d) for i, d in enumerate(data))]), 7)


def completion(text: str, finish: str | None = None) -> dict[str, object]:
    return {
        "id": "x",
        "choices": [{"index": 0, "text": text, "finish_reason": finish, "logprobs": None}],
        "usage": None,
    }


def chat(finish: str | None = None, **delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "error": None}


DONE = b"data: [DONE]\n\n"


def test_completion_tokens_and_usage() -> None:
    one = read(completion("a"), completion(""), completion("c", "length"), USAGE, DONE)
    assert (one.tokens_s, one.ended_s, one.failure) == ([11.0, 12.0, 13.0], 13.0, "")
    assert (one.num_input, one.num_output, one.asked_output, one.sent_s) == (5, 7, 7, 10.0)


def test_chat_role_and_final_events_are_no_tokens() -> None:
    one = read(
        chat(role="assistant", content=""),
        b": keep-alive\n\n",
        chat(reasoning_content="hm"),
        chat(content="a"),
        chat("stop"),
        DONE,
    )
    assert (one.tokens_s, one.ended_s) == ([13.0, 14.0], 15.0)
    assert one.num_output is None and one.output_tokens == 2, "no usage: events are counted"


def test_a_role_with_text_is_a_token() -> None:
    assert read(chat(role="assistant", content="a"), chat("stop", content="b"), DONE).tokens_s == [11.0, 12.0]
    assert read(chat(tool_calls=[{"index": 0}]), chat("tool_calls"), DONE).tokens_s == [11.0]


def test_an_answer_with_only_a_final_event() -> None:
    one = read(completion("", "stop"), DONE)
    assert (one.tokens_s, one.ended_s, one.failure) == ([11.0], 11.0, "")


@pytest.mark.parametrize(
    ("one", "failure"),
    [
        (
            read(completion("a"), {"error": {"message": "out of memory", "code": 500}}, DONE),
            "error event: out of memory",
        ),
        (read(completion("a"), completion("b")), "the stream ended before [DONE]"),
        (read(USAGE, DONE), "the stream had no token"),
        (read(b"data: {broken\n\n"), "not a completion chunk, or not an answer of a pooling model: JSON is malformed"),
        (read(b'{"error":{"message":"busy"}}', head=b"HTTP/1.1 429 Too Many Requests\r\n\r\n"), "HTTP 429: busy"),
        (read(b'{"error":"gone"}', head=b"HTTP/1.1 404 No\r\n\r\n"), "HTTP 404: gone"),
        (read(b'{"object":"error","message":"old"}', head=b"HTTP/1.1 400 No\r\n\r\n"), "HTTP 400: old"),
        (read(b"<html>", head=b"HTTP/1.1 502 Bad\r\n\r\n"), "HTTP 502: <html>"),
        (read(head=b"HTTP/1.1 503 No\r\n\r\n"), "HTTP 503: no text"),
        (read(head=b"HTT"), "the connection ended before a response"),
        (results.read(FinishedExchange([], failure="no connection: refused"), 7), "no connection: refused"),
    ],
)
def test_failures_have_the_servers_message(one: RequestResult, failure: str) -> None:
    assert one.failure.startswith(failure)
