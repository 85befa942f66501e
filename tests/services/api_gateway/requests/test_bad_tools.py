"""Wrong tools, choices and messages of tools are a 4xx that names the field; what is only large has an answer."""

import io
from typing import Any

import msgspec
import pytest

from blockyard.shared.messages import ToolDefaults

CHAT = "/v1/chat/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]
PARSERS = {"no parser": ToolDefaults(), "parser": ToolDefaults(auto_choice=True, parser="hermes")}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def calling(**of_call: Any) -> list[Any]:
    return [*USER, {"role": "assistant", "tool_calls": [of_call]}]


def schema_of_bytes(size: int) -> dict[str, Any]:
    """An object with many properties, as JSON of about this size."""
    described = {"type": "string", "description": "x" * 900}
    return {"type": "object", "properties": {f"property{i}": described for i in range(size // 970)}}


F = function("f")
THOUSAND = [function(f"f{i}", parameters={"properties": {"a": {"type": "string"}}}) for i in range(1000)]
NAMED = {"type": "function", "function": {"name": "g"}}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no list": ({"tools": {"f": {}}}, "tools"),
    "a text": ({"tools": "f"}, "tools"),
    "no object": ({"tools": ["f"]}, "tools[0]"),
    "no type": ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    "an unknown type": ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    "two of one name": ({"tools": [F, F]}, "tools[1].function.name"),
    "a space in a name": ({"tools": [function("get weather")]}, "tools[0].function.name"),
    "a letter that no name has": ({"tools": [function("météo")]}, "tools[0].function.name"),
    "an endless name": ({"tools": [function("f" * 10_000)]}, "tools[0].function.name"),
    "a text as a schema": ({"tools": [function("f", parameters="object")]}, "tools[0].function.parameters"),
    "a list as a schema": ({"tools": [function("f", parameters=[])]}, "tools[0].function.parameters"),
    "an unknown type of values": (
        {"tools": [function("f", parameters={"properties": {"a": {"type": "strin"}}})]},
        "tools[0].function.parameters.properties.a.type",
    ),
    "a schema of no object": (
        {"tools": [function("f", parameters={"type": "array"})]},
        "tools[0].function.parameters",
    ),
    "a choice that names no tool": ({"tools": [F], "tool_choice": NAMED}, "tool_choice"),
    "an unknown choice": ({"tools": [F], "tool_choice": "always"}, "tool_choice"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice"),
    "a choice that is a list": ({"tools": [F], "tool_choice": [NAMED]}, "tool_choice"),
    "too many": ({"tools": [function(f"f{i}") for i in range(3000)]}, "tools"),
    "too large": ({"tools": [function("f", parameters=schema_of_bytes(3 << 20))]}, "tools"),
    "a forced call of too large a schema": (
        {"tools": [function("f", parameters=schema_of_bytes(1 << 20))], "tool_choice": "required"},
        "tools",
    ),
    "a result without an id": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    "a result whose id is a number": (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]},
        "messages[0].tool_call_id",
    ),
    "a call without an id": (
        {"messages": calling(type="function", function={"name": "f", "arguments": "{}"})},
        "messages[1].tool_calls[0].id",
    ),
    "a call without a function": ({"messages": calling(id="1")}, "messages[1].tool_calls[0].function"),
    "more arguments than fit into the context": (
        {
            "messages": calling(
                id="1", type="function", function={"name": "f", "arguments": f'{{"a": "{"x" * (1 << 20)}"}}'}
            )
        },
        "messages",
    ),
}
LARGE: dict[str, dict[str, Any]] = {
    "1000 tools": {"tools": THOUSAND},
    "1000 tools of which one is forced": {
        "tools": THOUSAND,
        "tool_choice": {"type": "function", "function": {"name": "f999"}},
    },
    "1 MB of schema": {"tools": [function("f", parameters=schema_of_bytes(1 << 20))]},
    "a result of no call": {"tools": [F], "messages": [*USER, {"role": "tool", "content": "x", "tool_call_id": "1"}]},
}


async def post(r: Any, fields: dict[str, Any]) -> tuple[int, Any]:
    body = msgspec.json.encode({"model": "tiny", "messages": USER, "max_tokens": 2} | fields)
    async with r.http.post(CHAT, data=io.BytesIO(body), headers={"Content-Type": "application/json"}) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("parser", PARSERS)
async def test_wrong_tools_are_a_400_that_names_the_field(rig, parser: str) -> None:
    async with rig(tools=PARSERS[parser], max_body_bytes=8 << 20) as r:
        for name, (fields, field) in WRONG.items():
            status, answer = await post(r, fields)
            assert (status, answer["error"]["param"]) == (400, field), (name, answer)
        status, _ = await post(r, {"tools": [F], "tool_choice": "none"})
        assert status == 200


@pytest.mark.parametrize("parser", PARSERS)
async def test_large_tools_have_an_answer(rig, parser: str) -> None:
    async with rig(tools=PARSERS[parser], max_body_bytes=8 << 20) as r:
        for name, fields in LARGE.items():
            auto = {"tool_choice": "none"} if parser == "no parser" and "tool_choice" not in fields else {}
            status, answer = await post(r, fields | auto)
            assert status == 200, (name, answer)
