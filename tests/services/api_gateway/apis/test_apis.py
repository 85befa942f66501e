"""Each API writes whole and streamed answers from the same parts: they say the same."""

import itertools
from typing import Any

import msgspec
import pytest

from blockyard.services.api_gateway.apis.chat import CHAT
from blockyard.services.api_gateway.apis.completions import COMPLETIONS
from blockyard.services.api_gateway.apis.interface import PLAIN, Api, EventFields, FinishedChoice, Usage
from blockyard.services.api_gateway.apis.openai_fields import DONE, encode
from blockyard.services.api_gateway.requests.generate_request import ResponseOptions
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import FinishReason
from blockyard.shared.output_parsing.parts import CALL_END, Part, PartKind

USAGE = Usage(3, 5, None, 2)
TEXT = (Part(PartKind.CONTENT, "Hé"), Part(PartKind.CONTENT, 'l"lo\n'))
CALL = (Part(PartKind.CALL, "f", "c1"), Part(PartKind.ARGUMENTS, '{"a"'), Part(PartKind.ARGUMENTS, ": 1}"), CALL_END)
CUSTOM = (Part(PartKind.CALL, "run", "c2"), Part(PartKind.ARGUMENTS, "ls "), Part(PartKind.ARGUMENTS, "-l"), CALL_END)
THOUGHT = (Part(PartKind.REASONING, "so"), Part(PartKind.REASONING, " then"))
ANSWERS = {
    "nothing": (),
    "text": TEXT,
    "reasoning": THOUGHT,
    "reasoning and text": THOUGHT + TEXT,
    "a call": CALL,
    "all": THOUGHT + TEXT + CALL + CUSTOM + TEXT + CALL,
    "a call without arguments": (CALL[0], CALL_END),
}


def options(**fields: Any) -> ResponseOptions:
    return ResponseOptions("id-1", 7, "tiny", custom_tools=("run",), **fields)


def streamed(
    shown: ResponseOptions, parts: tuple[Part, ...], finish: FinishReason, api: Api = CHAT
) -> list[dict[str, Any]]:
    """The choice of each event."""
    events = api.events(shown).choice(0, None)
    data = [events.opening(None), *(events.event(part, PLAIN) for part in parts)]
    data.append(events.event(None, EventFields(finish, "x")))
    decoded = [msgspec.json.decode(event.removeprefix(b"data: ")) for event in data if event]
    return [event["choices"][0] for event in decoded]


def whole(shown: ResponseOptions, parts: tuple[Part, ...], finish: FinishReason, api: Api = CHAT) -> dict[str, Any]:
    body = api.whole(shown, [FinishedChoice(parts, finish, "x", [], [])], USAGE)
    choice: dict[str, Any] = msgspec.json.decode(body)["choices"][0]
    return choice


def accumulated(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, as clients put it together."""
    message: dict[str, Any] = dict.fromkeys(("content", "reasoning", "reasoning_content", "function_call"))
    message["tool_calls"] = []
    for delta in deltas:
        for call in delta.pop("tool_calls", []):
            index = call.pop("index")
            if index == len(message["tool_calls"]):
                message["tool_calls"].append({})
            _add(message["tool_calls"][index], call)
        _add(message, delta)
    return message


def _add(to: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if isinstance(value, dict):
            to[key] = to.get(key) or {}
            _add(to[key], value)
        elif value is not None:
            to[key] = (to.get(key) or "") + value


@pytest.mark.parametrize("function_call", [False, True])
@pytest.mark.parametrize("name", ANSWERS)
def test_a_chat_stream_adds_up_to_the_whole_message(name: str, function_call: bool) -> None:
    parts = ANSWERS[name]
    if function_call:  # it holds one call
        parts = parts[: parts.index(CALL_END) + 1] if CALL_END in parts else parts
    shown = options(has_reader=True, function_call=function_call)
    for finish in (FinishReason.STOP, FinishReason.LENGTH):
        choices, expected = streamed(shown, parts, finish), whole(shown, parts, finish)
        message = accumulated([choice["delta"] for choice in choices])
        assert message == {key: expected["message"][key] for key in message}
        end = choices[-1]
        assert (end["finish_reason"], end["stop_reason"]) == (expected["finish_reason"], "x")
        assert {choice["finish_reason"] for choice in choices[:-1]} <= {None}


def test_the_text_of_a_completion_is_the_same_streamed_and_whole() -> None:
    shown, stop = options(), FinishReason.STOP
    choices, expected = streamed(shown, TEXT, stop, COMPLETIONS), whole(shown, TEXT, stop, COMPLETIONS)
    assert "".join(choice["text"] for choice in choices) == expected["text"] == 'Hél"lo\n'
    assert choices[-1]["finish_reason"] == expected["finish_reason"] == "stop"


@pytest.mark.parametrize("stamp_s", [None, 1.5])
@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
def test_the_bytes_around_plain_text_make_the_same_event(api: Api, stamp_s: float | None) -> None:
    events = api.events(options(include_usage=True)).choice(2, None)
    around = events.around_text("a\n", stamp_s)
    assert around is not None
    assert encode("a\n").join(around) == events.event(Part(PartKind.CONTENT, "a\n"), EventFields(stamp_s=stamp_s))
    assert events.same_around_text == events.around_text("b", None)


@pytest.mark.parametrize("api", [CHAT, COMPLETIONS])
def test_the_end_of_a_stream(api: Api) -> None:
    events, error = api.events(options()), RequestError("it broke", status=500)
    assert events.ending(lambda: USAGE) == DONE
    assert events.failed(error) == b"data: " + api.error_body(error) + b"\n\n"
    assert msgspec.json.decode(api.error_body(error))["error"]["type"] == "server_error"


def test_the_message_of_every_kind_of_part() -> None:
    shown = options(has_reader=True)
    choice = whole(shown, ANSWERS["all"], FinishReason.STOP)
    function = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    custom = {"id": "c2", "type": "custom", "custom": {"name": "run", "input": "ls -l"}}
    assert choice["message"] | {"tool_calls": []} == {
        "role": "assistant",
        "content": 'Hél"lo\nHél"lo\n',
        "reasoning": "so then",
        "reasoning_content": "so then",
        "tool_calls": [],
        **dict.fromkeys(("refusal", "annotations", "audio", "function_call")),
    }
    assert choice["message"]["tool_calls"] == [function, custom, function]
    assert choice["finish_reason"] == "tool_calls"


def test_a_call_is_streamed_name_first() -> None:
    deltas = [choice["delta"] for choice in streamed(options(has_reader=True), CALL + CUSTOM, FinishReason.STOP)]
    assert deltas[0] == {"role": "assistant", "content": None}
    begun = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert deltas[1] == {"tool_calls": [begun]}
    assert deltas[2] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}
    custom = {"index": 1, "id": "c2", "type": "custom", "custom": {"name": "run", "input": ""}}
    assert deltas[4] == {"tool_calls": [custom]}
    assert deltas[5] == {"tool_calls": [{"index": 1, "custom": {"input": "ls "}}]}
    assert deltas[-1] == {} and len(deltas) == 8


def test_the_older_function_call() -> None:
    shown = options(has_reader=True, function_call=True)
    choices = streamed(shown, CALL, FinishReason.STOP)
    assert [choice["delta"] for choice in choices[1:3]] == [
        {"function_call": {"name": "f", "arguments": ""}},
        {"function_call": {"arguments": '{"a"'}},
    ]
    expected = whole(shown, CALL, FinishReason.STOP)
    assert expected["message"]["function_call"] == {"name": "f", "arguments": '{"a": 1}'}
    assert choices[-1]["finish_reason"] == expected["finish_reason"] == "function_call"


def test_usage_counts_reasoning_where_it_is_read() -> None:
    for api, (usage, details) in itertools.product(
        (CHAT, COMPLETIONS), [(USAGE, {"reasoning_tokens": 2}), (Usage(3, 5, 1), None)]
    ):
        shown = options(include_usage=True)
        expected = {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": None if usage.cached is None else {"cached_tokens": 1},
            "completion_tokens_details": details,
        }
        event = api.events(shown).ending(lambda usage=usage: usage).removesuffix(DONE)
        body = api.whole(shown, [FinishedChoice(TEXT, FinishReason.STOP, None, [], [])], usage)
        assert msgspec.json.decode(event.removeprefix(b"data: "))["usage"] == expected
        assert msgspec.json.decode(body)["usage"] == expected
