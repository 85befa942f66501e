"""Bad input to /v1/messages: each is a 400 in this API's error body, which names the field."""

from typing import Any

import pytest

from blockyard.shared.messages import Generate, Tokenize, ToolDefaults

PARSERS = ToolDefaults(auto_choice=True, parser="hermes", reasoning_parser="qwen3", reasoning_end="</think>")
TOOL = {"name": "f", "input_schema": {"type": "object"}}
ASK = {"role": "user", "content": "hi"}


def calls(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "tool_use", "id": i, "name": "f", "input": {}} for i in ids]}


def results(*ids: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i} | more for i in ids]}


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


# fields of the request, the field that is named, and a part of what is said
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no messages": ({"messages": None}, "messages", "missing"),
    "empty messages": ({"messages": []}, "messages", "empty"),
    "no max_tokens": ({"max_tokens": None}, "max_tokens", "missing"),
    "negative max_tokens": ({"max_tokens": -1}, "max_tokens", "at least 0"),
    "a text for max_tokens": ({"max_tokens": "9"}, "max_tokens", "Expected `int"),
    "a role": ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "Invalid enum value"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content", "missing required field"),
    "an unknown block": ({"messages": user({"type": "sound"})}, "messages[0].content[0].type", "'sound'"),
    "an image": ({"messages": user({"type": "image", "source": {}})}, "messages[0].content[0].type", "'image'"),
    "a document": ({"messages": user({"type": "document"})}, "messages[0].content[0].type", "'document'"),
    "an image in a result": (
        {"messages": [ASK, calls("a"), results("a", content=[{"type": "image"}])]},
        "messages[2].content[0].content[0].type",
        "'image'",
    ),
    "a tool that a server ran": (
        {"messages": [ASK, {"role": "assistant", "content": [{"type": "server_tool_use", "id": "x", "name": "y"}]}]},
        "messages[1].content[0].type",
        "'server_tool_use'",
    ),
    "text without text": ({"messages": user({"type": "text"})}, "messages[0].content[0].text", "needs the field"),
    "a call of a user": ({"messages": user({"type": "tool_use"})}, "messages[0].content[0].type", "role assistant"),
    "a result of an assistant": (
        {"messages": [ASK, {"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
        "messages[1].content[0].type",
        "role user",
    ),
    "a call without output": ({"messages": [ASK, calls("a"), ASK]}, "messages[1].content[0].id", "'a'"),
    "a call at the end": ({"messages": [ASK, calls("a")]}, "messages[1].content[0].id", "'a'"),
    "one output of two": ({"messages": [ASK, calls("a", "b"), results("a")]}, "messages[1].content[1].id", "'b'"),
    "an output without a call": (
        {"messages": [ASK, *user({"type": "text", "text": "x"}), results("z")]},
        "messages[2].content[0].tool_use_id",
        "'z'",
    ),
    "an output of an earlier turn": (
        {"messages": [ASK, calls("a"), results("a"), {"role": "assistant", "content": "x"}, results("a")]},
        "messages[4].content[0].tool_use_id",
        "has a result already",
    ),
    "two outputs of one call": (
        {"messages": [ASK, calls("a"), results("a", "a")]},
        "messages[2].content[1].tool_use_id",
        "already",
    ),
    "two calls with one id": ({"messages": [ASK, calls("a", "a")]}, "messages[1].content[1].id", "two blocks"),
    "a call without a name": (
        {"messages": [ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "input": {}}]}]},
        "messages[1].content[0].name",
        "needs the field name",
    ),
    "input that is no object": (
        {
            "messages": [
                ASK,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": [1]}]},
            ]
        },
        "messages[1].content[0].input",
        "must be an object",
    ),
    "thinking without thinking": (
        {"messages": [ASK, {"role": "assistant", "content": [{"type": "thinking"}]}]},
        "messages[1].content[0].thinking",
        "needs the field",
    ),
    "redacted thinking without data": (
        {"messages": [ASK, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}]},
        "messages[1].content[0].data",
        "needs the field",
    ),
    "a reference without a name": (
        {"messages": [ASK, calls("a"), results("a", content=[{"type": "tool_reference"}])]},
        "messages[2].content[0].content[0].tool_name",
        "needs the field",
    ),
    "an image for a system": ({"system": [{"type": "image"}]}, "system[0].type", "'image'"),
    "a block of a system message": (
        {"messages": [ASK, {"role": "system", "content": [{"type": "tool_addition"}]}]},
        "messages[1].content[0].type",
        "'tool_addition'",
    ),
    "an effort of one turn": (
        {"messages": [ASK, {"role": "system", "content": "x", "output_config": {"effort": "low"}}]},
        "messages[1].output_config",
        "not built",
    ),
    "no budget": ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "needs budget_tokens"),
    "a negative budget": (
        {"thinking": {"type": "enabled", "budget_tokens": -1}},
        "thinking.budget_tokens",
        "at least 0",
    ),
    "a kind of thinking": ({"thinking": {"type": "loud"}}, "thinking.type", "Invalid enum value"),
    "an effort": ({"output_config": {"effort": "some"}}, "output_config.effort", "Invalid enum value"),
    "a format": ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type", "Invalid"),
    "a schema": ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "missing"),
    "two formats": (
        {
            "output_config": {"format": {"type": "json_schema", "schema": {}}},
            "output_format": {"type": "json_schema", "schema": {}},
        },
        "output_format",
        "two names",
    ),
    "a tool without a schema": ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "needs its input_schema"),
    "a schema that is no object": (
        {"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
        "tools[0].input_schema",
        "object",
    ),
    "a tool's name": ({"tools": [TOOL, TOOL | {"name": "a b"}]}, "tools[1].name", "letters"),
    "two tools": ({"tools": [TOOL, TOOL]}, "tools[1].name", "two tools"),
    "a tool of another server": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "bash_"),
    "a choice without tools": ({"tool_choice": {"type": "any"}}, "tool_choice", "needs tools"),
    "a choice of no tool": (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice.name",
        "'g'",
    ),
    "a tool that a server runs": (
        {
            "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        "tools[1].type",
        "web_search",
    ),
    "a stop sequence": ({"stop_sequences": [""]}, "stop_sequences", "each stop_sequences string"),
    "a user": ({"metadata": {"user_id": "u" * 600}}, "metadata.user_id", "at most"),
    "a thread": ({"thread": {"type": "create"}}, "thread", "not built"),
    "servers of tools": ({"mcp_servers": [{"name": "x"}]}, "mcp_servers", "not built"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_bad_input_is_a_400_that_names_the_field(rig, name: str) -> None:
    fields, field, said = WRONG[name]
    async with rig(tools=PARSERS) as r:
        status, body = await r.post("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": [ASK]} | fields)
        assert not r.ring.frames(Tokenize) and not r.ring.frames(Generate)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    message = body["error"]["message"]
    assert message.startswith((f"{field}: ", f"{field} ")) and said in message, message


async def test_what_changes_nothing(rig) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    plain = {"messages": [ASK, calls("a"), results("a", content="r")], "tools": [TOOL], "system": "s"}
    marked = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", **cached}]},
            calls("a"),
            results("a", content=[{"type": "text", "text": "r"}], **cached),
        ],
        "tools": [TOOL | cached | {"defer_loading": True, "type": "custom", "input_examples": [{}]}],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc=1;"},
            {"type": "text", "text": "s", **cached},
        ],
        "context_management": {"edits": []},
        "service_tier": "auto",
        "mcp_servers": [],
    }
    async with rig(tools=PARSERS) as r:
        for path, fields in (("/v1/messages", plain), ("/v1/messages?beta=true", marked)):
            asked = {"model": "tiny", "max_tokens": 1} | fields
            async with r.http.post(path, json=asked) as response:
                assert (response.status, "x-blockyard-ignored" in response.headers) == (200, False), (
                    await response.text()
                )
        first, second = r.ring.frames(Tokenize)
    assert (first.messages, first.tools) == (second.messages, second.tools)


async def test_tools_that_a_server_would_run_are_left_out(rig) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    asked = {"model": "tiny", "max_tokens": 1, "messages": [ASK], "tools": [TOOL, search]}
    async with rig(tools=PARSERS) as r:
        async with r.http.post("/v1/messages", json=asked) as response:
            assert response.status == 200
            assert response.headers["x-blockyard-ignored"] == "tools.max_uses, tools.web_search_20250305"
        [sent] = r.ring.frames(Tokenize)
    assert b"web_search" not in sent.tools and b'"f"' in sent.tools
    async with rig(tools=PARSERS, strict_fields=True) as r:
        status, body = await r.post("/v1/messages", asked | {"tools": [TOOL, {"type": search["type"], "name": "x"}]})
    assert status == 400 and body["error"]["message"].startswith("tools[1].type: ")
