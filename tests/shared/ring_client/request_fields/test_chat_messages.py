"""Messages of agents: earlier calls with their arguments as JSON values, results of tools, reasoning."""

import json
from typing import Any

import msgspec
import pytest

from blockyard.services.tokenizer_pool.chats.chat_messages import ContentStyle, for_template
from blockyard.shared.errors import RequestError
from blockyard.shared.ring_client.request_fields.chat_messages import Message, read_messages
from blockyard.shared.ring_client.request_fields.known_fields import decode_known

STYLE = ContentStyle(loops=True, tests_string=True)  # of a template that takes content as it is


def sent(*messages: dict[str, Any]) -> bytes:
    """What the tokenizer gets."""
    decoded, ignored = decode_known(msgspec.json.encode(messages), list[Message], strict=True)
    assert not ignored
    return read_messages(decoded)


def shown(*messages: dict[str, Any]) -> list[Any]:
    """What a template sees."""
    return for_template(json.loads(sent(*messages)), STYLE)


def test_messages_in_the_usual_spelling_are_sent_as_they_came() -> None:
    function = {"name": "f", "arguments": '{"a": [1, 2]}'}
    messages = [
        {"role": "user", "content": "hi", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {
            "role": "tool",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "tool_call_id": "1",
        },
    ]
    assert json.loads(sent(*messages)) == messages


def call(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [fields]}


def calls_f(arguments: Any) -> dict[str, Any]:
    return call(id="1", type="function", function={"name": "f", "arguments": arguments})


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"b": 1, "a": [null, "é"]}', {"b": 1, "a": [None, "é"]}),
        ({"b": 1, "a": 2}, {"b": 1, "a": 2}),
        ("", {}),
        (None, {}),
        ("null", {}),
        (" ", {}),
        ('{"a":', '{"a":'),
        ("[1]", "[1]"),
        ([1], "[1]"),
        ("5", "5"),
        ("no", "no"),
        ("{'a': 1}", "{'a': 1}"),
        ("[" * 100_000, "[" * 100_000),
        (json.dumps('{"a": 1}'), {"a": 1}),
        (json.dumps("null"), {}),
        (json.dumps('{"a":'), '{"a":'),
    ],
)
def test_arguments_are_objects_where_they_can(arguments: Any, value: Any) -> None:
    [message] = shown(calls_f(arguments))
    assert message["content"] == ""
    [made] = message["tool_calls"]
    assert made == {"id": "1", "type": "function", "function": {"name": "f", "arguments": value}}
    assert list(made["function"]["arguments"]) == list(value)  # in the same order


def test_what_a_client_library_adds_to_its_answers_is_taken() -> None:
    function = {"name": "f", "arguments": "{}", "parsed_arguments": {"a": 1}}
    own = {"refusal": None, "audio": None, "function_call": None, "annotations": [], "parsed": None}
    [message] = shown(call(id="1", type="function", index=0, function=function) | own)
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


def test_results_keep_their_ids_and_join_their_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    one, many = shown(
        {"role": "tool", "tool_call_id": "1", "content": "x"},
        {"role": "tool", "tool_call_id": "2", "name": "f", "content": parts},
    )
    assert one == {"role": "tool", "content": "x", "tool_call_id": "1"}
    assert many == {"role": "tool", "content": parts, "name": "f", "tool_call_id": "2"}


def test_the_older_form_is_a_call_and_its_result() -> None:
    asked, result = shown(
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "f", "content": "x"},
    )
    assert asked["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert (result["role"], result["name"]) == ("tool", "f")
    assert result["tool_call_id"] == asked["tool_calls"][0]["id"]


def test_a_custom_call_is_shown_as_its_tool_is() -> None:
    [message] = shown(call(id="1", type="custom", custom={"name": "run", "input": 'print("x")'}))
    assert message["tool_calls"][0]["function"] == {"name": "run", "arguments": {"input": 'print("x")'}}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_has_one_name(name: str) -> None:
    assert shown({"role": "assistant", "content": "x", name: "because"})[0]["reasoning_content"] == "because"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": ""}, "messages[0].tool_call_id"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "function", "content": "x"}, "messages[0].name"),
        ({"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        (call(id="1"), "messages[0].tool_calls[0].function"),
        (call(id="1", type="custom"), "messages[0].tool_calls[0].custom"),
        (call(function={"name": "f", "arguments": "{}"}), "messages[0].tool_calls[0].id"),
    ],
)
def test_wrong_messages_are_refused_by_name(message: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as e:
        shown(message)
    assert e.value.field == field


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text", "refusal", "thinking"])
def test_parts_of_all_apis_are_text(kind: str) -> None:
    """Agents that also speak /v1/responses send its parts back; vLLM reads them, too."""
    field = kind if kind in ("refusal", "thinking") else "text"
    [message] = shown({"role": "user", "content": [{"type": kind, field: "hm"}]})
    assert message["content"] == "hm"
    with pytest.raises(RequestError, match=f"needs the field {field}"):
        shown({"role": "user", "content": [{"type": kind}]})


def test_a_tool_may_answer_null() -> None:
    assert shown({"role": "tool", "tool_call_id": "1", "content": None})[0]["content"] == ""
