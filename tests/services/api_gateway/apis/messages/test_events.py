"""Streamed answers of /v1/messages equal whole ones in every split of the text, as the official client adds them up."""

import json
from typing import Any

import jiter
import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from blockyard.services.api_gateway.apis.hidden_reasoning import read_hidden_reasoning
from blockyard.services.api_gateway.apis.interface import PLAIN, EventFields, FinishedChoice, Usage
from blockyard.services.api_gateway.apis.messages.api import MESSAGES
from blockyard.services.api_gateway.apis.messages.partial_json import complete_object
from blockyard.services.api_gateway.requests.generate_request import MessagesOptions, ResponseOptions
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import FinishReason
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind

USAGE = Usage(10, 7, 4, 2)
EVENTS: Any = TypeAdapter(RawMessageStreamEvent)
TEXTS = ["", "Hé ", '"quoted"\n', "\u2028 \x00", "😀", "data: x\n\n"]
INPUT = json.dumps({"a": ["é\n", {"b": -1.5e3}], "c": {"d": None, "e": True}, "f": '\\"'}, ensure_ascii=False)


def options(**fields: Any) -> ResponseOptions:
    return ResponseOptions("msg_1", 7, "tiny", has_reader=True, messages=MessagesOptions(100, 1000, **fields))


@st.composite
def answers(draw: Any) -> tuple[list[Part], FinishReason, str | None]:
    """Parts of an answer in pieces of any size, and how it ended: a last call may be cut off."""
    parts: list[Part] = []
    for i in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from([PartKind.CONTENT, PartKind.REASONING, PartKind.CALL]))
        if kind is not PartKind.CALL:
            parts += [Part(kind, draw(st.sampled_from(TEXTS))) for _ in range(draw(st.integers(1, 4)))]
            continue
        parts += [Part(kind, "f", f"call_{i}"), *pieces(draw, draw(st.sampled_from([INPUT, "{}", ""]))), CALL_END]
    finish = draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
    if draw(st.booleans()):
        cut = INPUT[: draw(st.integers(0, len(INPUT)))]
        parts += [Part(PartKind.CALL, "g", "call_9"), *pieces(draw, cut)]
    return parts, finish, draw(st.sampled_from([None, "stop"]))


def pieces(draw: Any, text: str) -> list[Part]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [Part(PartKind.ARGUMENTS, text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def streamed(shown: ResponseOptions, parts: list[Part], finish: FinishReason, reason: Any) -> list[bytes]:
    answer = MESSAGES.events(shown)
    choice = answer.choice(0, None)
    data = [choice.opening(Usage(10, 0, 4, 0))]
    for part in parts:
        around = choice.around_text(part.text, None) if part.kind is PartKind.CONTENT and part.text else None
        if around is None:
            data.append(choice.event(part, PLAIN))
        else:
            data.append(around[0] + msgspec.json.encode(part.text) + around[1])
    data.append(choice.event(None, EventFields(finish, reason)))
    data.append(answer.ending(lambda: USAGE))
    return [event + b"\n\n" for event in b"".join(data).split(b"\n\n") if event]


def decoded(data: list[bytes]) -> list[dict[str, Any]]:
    """The data of the events; each has a line with its type before it."""
    out = []
    for event in data:
        first, second = event.decode().rstrip("\n").split("\n")
        out.append(json.loads(second.removeprefix("data: ")))
        assert first == f"event: {out[-1]['type']}"
    return out


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        snapshot = accumulate_event(event=EVENTS.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
    message: dict[str, Any] = snapshot.to_dict()
    return message


@given(answers(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_stream_adds_up_to_the_whole_answer(
    answer: tuple[list[Part], FinishReason, str | None], shows_thinking: bool
) -> None:
    parts, finish, reason = answer
    shown = options(shows_thinking=shows_thinking)
    whole = json.loads(MESSAGES.whole(shown, [FinishedChoice(parts, finish, reason, [], [])], USAGE))
    events = decoded(streamed(shown, parts, finish, reason))
    assert Message.model_validate(whole).to_dict() | {"stop_details": None} == added_up(events)
    check_order(events)
    texts = [block["thinking"] for block in whole["content"] if block["type"] == "thinking"]
    if not shows_thinking:
        assert set(texts) <= {""}
        texts = [
            read_hidden_reasoning(block["signature"]) or "" for block in whole["content"] if block["type"] == "thinking"
        ]
    assert "".join(texts) == "".join(part.text for part in parts if part.kind is PartKind.REASONING)


def check_order(events: list[dict[str, Any]]) -> None:
    """Each block begins, has deltas of its kind, and ends once, in order of the indexes."""
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    opened, is_open = -1, False
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == opened + 1
            opened, is_open = opened + 1, True
            continue
        assert is_open and event["index"] == opened
        is_open = event["type"] != "content_block_stop"
    assert not is_open


@given(
    st.sampled_from([INPUT, '{"a": 12, "b": "x"}', '[1, {"a": ', "null", "x", '{"a" : 1 , "b" : [ 2 , 3']), st.data()
)
@settings(max_examples=200, deadline=None)
def test_input_that_is_cut_off_is_read_as_the_client_reads_it(text: str, data: Any) -> None:
    cut = text[: data.draw(st.integers(0, len(text)))]
    try:
        expected = jiter.from_json(cut.encode(), partial_mode=True)
    except ValueError:
        expected = None
    assert json.loads(bytes(complete_object(cut))) == (expected if isinstance(expected, dict) else {})


@pytest.mark.parametrize(
    ("finish", "reason", "usage", "parts", "expected"),
    [
        (FinishReason.STOP, None, USAGE, [], ("end_turn", None)),
        (FinishReason.STOP, 7, USAGE, [], ("end_turn", None)),
        (FinishReason.STOP, "x", USAGE, [Part(PartKind.CONTENT, "a")], ("stop_sequence", "x")),
        (FinishReason.STOP, "x", USAGE, [Part(PartKind.CALL, "f", "c"), CALL_END], ("tool_use", None)),
        (FinishReason.STOP, None, USAGE, [Part(PartKind.CALL, "f", "c")], ("end_turn", None)),
        (FinishReason.LENGTH, None, Usage(10, 100), [Part(PartKind.CALL, "f", "c"), CALL_END], ("max_tokens", None)),
        (FinishReason.LENGTH, None, Usage(990, 10), [], ("model_context_window_exceeded", None)),
        (FinishReason.LENGTH, None, Usage(900, 100), [], ("max_tokens", None)),
    ],
)
def test_stop_reasons(finish: Any, reason: Any, usage: Usage, parts: list[Part], expected: tuple[str, Any]) -> None:
    whole = json.loads(MESSAGES.whole(options(), [FinishedChoice(parts, finish, reason, [], [])], usage))
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected


def test_usage_counts_cached_tokens_apart() -> None:
    whole = json.loads(MESSAGES.whole(options(), [FinishedChoice([], FinishReason.STOP, None, [], [])], USAGE))
    assert whole["usage"] == {
        "input_tokens": 6,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
        "output_tokens_details": {"thinking_tokens": 2},
    }
    [start, *_] = decoded(streamed(options(), [], FinishReason.STOP, None))
    assert (start["message"]["usage"]["input_tokens"], start["message"]["usage"]["output_tokens"]) == (6, 0)


def test_a_failure_is_an_event() -> None:
    event = MESSAGES.events(options()).failed(RequestError("it broke", status=503))
    [error] = decoded([event])
    assert error == {"type": "error", "error": {"type": "overloaded_error", "message": "it broke"}}
    assert decoded([MESSAGES.keep_alive]) == [{"type": "ping"}]
