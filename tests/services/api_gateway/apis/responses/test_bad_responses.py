"""Bad bodies of /v1/responses are a 400 that names the field."""

import contextlib
from typing import Any

import msgspec
import pytest

from blockyard.shared.errors import RequestError

F: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
USER: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "x"}
CUSTOM: dict[str, Any] = {"type": "custom_tool_call", "call_id": "c1", "name": "p", "input": "x"}
IMAGE: dict[str, Any] = {"type": "input_image", "image_url": "data:", "detail": "auto"}
WEB: dict[str, Any] = {"type": "web_search"}

ITEMS: dict[str, tuple[list[Any], str]] = {
    "none": ([], "input"),
    "no type": ([USER, {}], "input[1].type"),
    "an unknown type": ([USER, {"type": "function_cal"}], "input[1].type"),
    "a reference": ([USER, {"type": "item_reference", "id": "msg_1"}], "input[1].type"),
    "an id alone": ([USER, {"id": "msg_1"}], "input[1].type"),
    "compacted items": ([{"type": "compaction", "encrypted_content": "x"}], "input[0].type"),
    "a call without its output": ([USER, CALL, USER], "input[1].call_id"),
    "an output without its call": ([USER, OUTPUT], "input[1].call_id"),
    "an output before its call": ([OUTPUT, CALL], "input[0].call_id"),
    "two outputs of a call": ([CALL, OUTPUT, OUTPUT], "input[2].call_id"),
    "two calls of one id": ([CALL, CALL, OUTPUT], "input[1].call_id"),
    "two items of one id": ([USER | {"id": "m"}, USER, USER | {"id": "m"}], "input[2].id"),
    "an output of another kind": (
        [CALL, {"type": "tool_search_output", "call_id": "c1", "tools": []}],
        "input[1].type",
    ),
    "no id of a call": ([CALL | {"call_id": None}], "input[0].call_id"),
    "an empty id of a call": ([CALL | {"call_id": ""}], "input[0].call_id"),
    "no name": ([CALL | {"name": None}], "input[0].name"),
    "no input": ([CUSTOM | {"input": None}], "input[0].input"),
    "no output": ([CALL, OUTPUT | {"output": None}], "input[1].output"),
    "an object as output": ([CALL, OUTPUT | {"output": {"a": 1}}], "input[1].output"),
    "an image in an output": ([CALL, OUTPUT | {"output": [IMAGE]}], "input[1].output[0].type"),
    "an image": (
        [USER, {"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}],
        "input[1].content[1].type",
    ),
    "a part without text": ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
    "no content": ([{"role": "user"}], "input[0].content"),
    "an unknown role": ([{"role": "tool", "content": "x"}], "input[0].role"),
    "a role that is no text": ([{"role": 1, "content": "x"}], "input[0].role"),
    "damaged reasoning": ([{"type": "reasoning", "encrypted_content": "blockyard.!"}], "input[0].encrypted_content"),
    "reasoning that is not UTF-8": (
        [{"type": "reasoning", "encrypted_content": "blockyard.7aCA"}],  # a surrogate
        "input[0].encrypted_content",
    ),
    "reasoning without text": ([{"type": "reasoning", "content": [{"type": "reasoning_text"}]}], "input[0].content[0]"),
    "a wrong tool that was found": (
        [
            {"type": "tool_search_call", "call_id": "c1", "arguments": {}, "execution": "client"},
            {"type": "tool_search_output", "call_id": "c1", "tools": [F, {"type": "function"}]},
        ],
        "input[1].tools[1].name",
    ),
}
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "an empty text": ({"input": ""}, "input"),
    "a number as input": ({"input": 1}, "input"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "a prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "an earlier response": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "background": ({"background": True}, "background"),
    "moderation": ({"moderation": {"model": "x"}}, "moderation"),
    "max_tokens": ({"max_tokens": 5}, "max_tokens"),
    "messages": ({"messages": [USER]}, "messages"),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format"),
    "several answers": ({"n": 2}, "n"),
    "no output tokens": ({"max_output_tokens": 0}, "max_output_tokens"),
    "no tool calls": ({"max_tool_calls": 0}, "max_tool_calls"),
    "an unknown include": ({"include": ["reasoning.encrypted_content", "x"]}, "include[1]"),
    "too many candidates": ({"top_logprobs": 21}, "top_logprobs"),
    "an unknown truncation": ({"truncation": "middle"}, "truncation"),
    "an unknown effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    "a summary that no float holds": ({"reasoning": {"summary": msgspec.Raw(b"1e999")}}, "reasoning.summary"),
    "a summary of a wrong type": ({"reasoning": {"summary": {"type": "auto"}}}, "reasoning.summary"),
    "an unknown format": ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    "a format without schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    "two limits of the text": (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
    ),
    "many metadata": ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    "a long value": ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    "metadata that is no text": ({"metadata": {"a": 1}}, "metadata[...]"),
    "a range": ({"top_p": 0.0}, "top_p"),
    "connectors": ({"kv_transfer_params": [1]}, "kv_transfer_params"),
    "a tool that is no object": ({"tools": ["f"]}, "tools[0]"),
    "an unknown tool": ({"tools": [{"type": "functio"}]}, "tools[0].type"),
    "a tool in chat's form": ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name"),
    "two tools of a name": ({"tools": [F, F]}, "tools[1].name"),
    "parameters": ({"tools": [F | {"parameters": {"type": "array"}}]}, "tools[0].parameters"),
    "a description": ({"tools": [F | {"description": 1}]}, "tools[0].description"),
    "a wrong format": ({"tools": [{"type": "custom", "name": "p", "format": {"type": "x"}}]}, "tools[0].format"),
    "no grammar": ({"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar"}}]}, "tools[0].format"),
    "a namespace without tools": ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
    "a server's tool in one": (
        {"tools": [{"type": "namespace", "name": "a", "tools": [WEB]}]},
        "tools[0].tools[0].type",
    ),
    "a choice of nothing": ({"tool_choice": "required"}, "tool_choice"),
    "a choice of what is left out": ({"tools": [WEB], "tool_choice": "required"}, "tool_choice"),
    "a forced tool of a server": ({"tools": [WEB], "tool_choice": WEB}, "tool_choice"),
    "a forced server": ({"tools": [F], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
    "an unknown choice": ({"tools": [F], "tool_choice": "always"}, "tool_choice"),
    "a choice of no tool": ({"tools": [F], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    "an empty choice": (
        {"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
        "tool_choice.tools",
    ),
    "an allowed tool that is none": (
        {"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [F, F | {"name": "g"}]}},
        "tool_choice.tools[1]",
    ),
}
ALL = {name: ({"input": items}, field) for name, (items, field) in ITEMS.items()} | {
    f"field: {name}": case for name, case in FIELDS.items()
}


@pytest.mark.parametrize("name", ALL)
def test_bad_input_names_its_field(parse, name: str) -> None:
    body, field = ALL[name]
    with pytest.raises(RequestError) as caught:
        parse(**body)
    assert (caught.value.status, caught.value.field) == (400, field), str(caught.value)
    assert len(str(caught.value)) < 700


def test_the_strict_server_refuses_what_it_would_leave_out(parse) -> None:
    for body, field in (
        ({"tools": [F, WEB]}, "tools[1].type"),
        ({"input": [USER, {"type": "web_search_call", "id": "ws_1"}]}, "input[1].type"),
        ({"new_field": 1}, "new_field"),
    ):
        with pytest.raises(RequestError) as caught:
            parse(strict=True, **body)
        assert caught.value.field == field


def test_what_is_nested_deeply_is_no_crash(parse) -> None:
    """At every depth near that at which the decoder or the encoder gives up."""
    for depth in (60, *range(900, 1010), 5000):
        deep = b"[" * depth + b"]" * depth
        for body in (
            b'{"input": "hi", "tools": [{"type": "function", "name": "f", "x": %b}]}',
            b'{"input": "hi", "tools": [{"type": "function", "name": "f", "parameters": {"enum": [%b]}}]}',
            b'{"input": [{"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": %b},'
            b' {"type": "tool_search_output", "call_id": "c", "tools": []}]}',
        ):
            with contextlib.suppress(RequestError):
                parse(data=body % deep)
