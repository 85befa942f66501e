"""Items of the input become the messages of a prompt, and tools of every kind those that the answer may call."""

from typing import Any

import msgspec
import pytest

from blockyard.services.api_gateway.apis.hidden_reasoning import hide_reasoning
from blockyard.services.api_gateway.bodies.parse_body import ParsedGeneration
from blockyard.shared.messages import GrammarKind, ModelSettings
from blockyard.shared.ring_client.request_fields.tools import ToolMode
from blockyard.shared.tool_parsers.tools import TextSyntax

F: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "format": {"type": "text"}}
USER: dict[str, Any] = {"role": "user", "content": "hi"}


def call(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"} | fields


def output(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "done"} | fields


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "role": "assistant", "id": f"msg_{text}", "status": "completed", "content": content}


def thought(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{text}", "summary": []} | fields


def messages(parsed: ParsedGeneration) -> list[Any]:
    found: list[Any] = msgspec.json.decode(parsed.request.prompts[0].messages or b"")
    return found


def short(parsed: ParsedGeneration) -> list[Any]:
    """Each message as its role and what it says: text, reasoning, and the ids of its calls or of its call."""
    out = []
    for one in messages(parsed):
        ids = [c["id"] for c in one.get("tool_calls", [])] or one.get("tool_call_id")
        out.append(tuple(filter(None, (one["role"], one["content"], one.get("reasoning_content"), ids))))
    return out


def shown_tools(parsed: ParsedGeneration) -> list[Any]:
    return [one["function"] for one in msgspec.json.decode(parsed.request.prompts[0].tools or b"[]")]


def test_a_text_is_a_message_of_the_user(parse) -> None:
    assert short(parse(input="hi")) == [("user", "hi")]
    assert short(parse(input="hi", instructions="Be brief.")) == [("system", "Be brief."), ("user", "hi")]


def test_messages_of_every_role_stay_where_they_are(parse) -> None:
    items = [
        {"role": "developer", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "system", "content": "d"},
        {"role": "user", "content": [{"type": "input_text", "text": "e"}, {"type": "input_text", "text": "f"}]},
    ]
    two = [{"type": "text", "text": "e"}, {"type": "text", "text": "f"}]
    assert short(parse(input=items)) == [
        ("system", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("system", "d"),
        ("user", two),
    ]


def test_what_the_assistant_did_in_one_turn_is_one_message(parse) -> None:
    items = [
        USER,
        thought("r", content=[{"type": "reasoning_text", "text": "So."}]),
        said("Look"),
        call("1"),
        call("2"),
    ]
    items += [
        output("1"),
        output("2"),
        thought("q", content=[{"type": "reasoning_text", "text": "Then."}]),
        said("End"),
    ]
    assert short(parse(input=items, tools=[F])) == [
        ("user", "hi"),
        ("assistant", "Look", "So.", ["1", "2"]),
        ("tool", "done", "1"),
        ("tool", "done", "2"),
        ("assistant", "End", "Then."),
    ]


def test_reasoning_comes_back_wherever_it_stands(parse) -> None:
    a, b = (thought(x, content=[{"type": "reasoning_text", "text": x}]) for x in "ab")
    assert short(parse(input=[said("x"), a, said("y"), b])) == [
        ("assistant", "x"),
        ("assistant", "y", "a"),
        ("assistant", "b"),
    ]
    assert short(parse(input=[call("1"), a, call("2"), output("1"), output("2")]))[0] == ("assistant", "a", ["1", "2"])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"encrypted_content": hide_reasoning("S\u00e9")}, "S\u00e9"),
        ({"encrypted_content": "gAAAAABo of another server"}, None),
        ({"summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "gAAAA"}, "short"),
        ({"summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": hide_reasoning("long")}, "long"),
        ({"content": None, "encrypted_content": None}, None),
    ],
)
def test_the_sources_of_reasoning(parse, fields: dict[str, Any], text: str | None) -> None:
    found = messages(parse(input=[USER, thought("r", **fields), said("x")]))[1]
    assert found.get("reasoning_content") == text and found["content"] == "x"


def test_what_comes_between_a_call_and_its_output_waits(parse) -> None:
    items = [USER, call("1"), call("2"), {"role": "developer", "content": "d"}, output("2"), USER, output("1"), USER]
    assert short(parse(input=items)) == [
        ("user", "hi"),
        ("assistant", ["1", "2"]),
        ("tool", "done", "2"),
        ("tool", "done", "1"),
        ("system", "d"),
        ("user", "hi"),
        ("user", "hi"),
    ]


def test_custom_calls_and_outputs_as_lists(parse) -> None:
    parts = [{"type": "input_text", "text": "ok"}]
    items = [
        {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "+x", "id": "ctc_1"},
        {"type": "custom_tool_call_output", "call_id": "1", "output": parts},
        call("2", arguments='{"a": 1}', status="completed", id="fc_2"),
        output("2", output=[*parts, *parts]),
    ]
    parsed = parse(input=items, tools=[F, PATCH])
    first, ok, second, twice = messages(parsed)
    assert first["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "+x"}}
    assert second["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert ok["content"] == "ok" and [part["text"] for part in twice["content"]] == ["ok", "ok"]
    assert parsed.request.options.custom_tools == ("patch",)


def test_tools_of_a_server_are_left_out_and_named(parse) -> None:
    tools = [{"type": "web_search"}, F, {"type": "image_generation"}, {"type": "local_shell"}, {"type": "tool_search"}]
    items = [USER, {"type": "web_search_call", "id": "ws_1", "status": "completed"}, USER]
    parsed = parse(tools=tools, input=items)
    assert [one["name"] for one in shown_tools(parsed)] == ["f"] and short(parsed) == [("user", "hi")] * 2
    names = ["tools.web_search", "tools.image_generation", "tools.local_shell", "tools.tool_search"]
    assert parsed.ignored == [*names, "input.web_search_call"]
    assert parse(tools=tools[:1]).request.tools is None


def test_tools_of_a_namespace(parse) -> None:
    inner = {"type": "function", "name": "find", "description": "Finds.", "parameters": {"type": "object"}}
    tools = [
        {"type": "namespace", "name": "a", "description": "All of a.", "tools": [inner, PATCH]},
        {"type": "namespace", "name": "b", "tools": [inner]},
    ]
    items = [call("1", name="find", namespace="b"), output("1"), call("2", name="find", namespace="a"), output("2")]
    parsed = parse(tools=tools, input=items)
    assert [(one["name"], one["description"]) for one in shown_tools(parsed)] == [
        ("find", "Namespace a: All of a.\nFinds."),
        ("patch", "Namespace a"),
        ("b__find", "Namespace b\nFinds."),
    ]
    own = parsed.request.options.responses
    assert own is not None and own.tool_names == {
        "find": ("a", "find"),
        "patch": ("a", "patch"),
        "b__find": ("b", "find"),
    }
    names = [c["function"]["name"] for one in messages(parsed) for c in one.get("tool_calls", [])]
    assert names == ["b__find", "find"]


def test_tools_that_the_client_found_are_shown_where_it_found_them(parse) -> None:
    search = {"type": "tool_search", "execution": "client", "description": "Finds tools."}
    tools = [F, F | {"name": "g", "defer_loading": True}, search]
    found = [
        {"type": "tool_search_call", "call_id": "1", "execution": "client", "arguments": {"query": "g"}},
        {"type": "tool_search_output", "call_id": "1", "execution": "client", "tools": [tools[1], F | {"name": "h"}]},
    ]
    before, after = parse(tools=tools), parse(tools=tools, input=[USER, *found])
    for parsed in (before, after):
        assert [one["name"] for one in shown_tools(parsed)] == ["f", "tool_search"]
    assert before.request.tools is not None and [t.name for t in before.request.tools.tools] == ["f", "tool_search"]
    assert after.request.tools is not None
    assert {t.name for t in after.request.tools.tools} == {"f", "tool_search", "g", "h"}
    _, asked, answer = messages(after)
    assert asked["tool_calls"][0]["function"] == {"name": "tool_search", "arguments": {"query": "g"}}
    assert [one["function"]["name"] for one in msgspec.json.decode(answer["content"])] == ["g", "h"]
    assert [one["name"] for one in shown_tools(parse(tools=tools[:2]))] == ["f", "g"]  # nobody would find it


def test_additional_tools_at_the_head_count_as_those_of_the_field(parse) -> None:
    search = {"type": "tool_search", "execution": "client"}
    group = {"type": "namespace", "name": "functions", "tools": [PATCH, F | {"name": "g", "defer_loading": True}]}
    head = {"type": "additional_tools", "role": "developer", "tools": [group, F, search, {"type": "web_search"}]}
    rules = {"role": "developer", "content": "Rules."}
    parsed = parse(input=[rules, head, USER], tools=[F | {"description": "The field's."}])
    assert [one["name"] for one in shown_tools(parsed)] == ["f", "patch", "tool_search"]
    assert shown_tools(parsed)[0]["description"] == "The field's."
    assert short(parsed) == [("system", "Rules."), ("user", "hi")] and parsed.request.ignored == ("tools.web_search",)
    assert parsed.request.options.custom_tools == ("patch",)
    later = parse(input=[head, USER, head | {"tools": [F | {"name": "h"}]}, USER])
    assert [one["name"] for one in shown_tools(later)] == ["patch", "f", "tool_search"]
    assert later.request.tools is not None and "h" in [tool.name for tool in later.request.tools.tools]
    assert [one["role"] for one in messages(later)] == ["user", "system", "user"] and '"h"' in messages(later)[1][
        "content"
    ]


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, ToolMode.AUTO, ["f", "patch"]),
        ("auto", ToolMode.AUTO, ["f", "patch"]),
        ("none", ToolMode.NONE, []),
        ("required", ToolMode.REQUIRED, ["f", "patch"]),
        ({"type": "function", "name": "f"}, ToolMode.NAMED, ["f"]),
        ({"type": "custom", "name": "patch"}, ToolMode.NAMED, ["patch"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]},
            ToolMode.REQUIRED,
            ["patch"],
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, ToolMode.NONE, []),
    ],
)
def test_choices(parse, choice: Any, mode: ToolMode, names: list[str]) -> None:
    use = parse(tools=[F, PATCH, {"type": "web_search"}], tool_choice=choice).request.tools
    assert use is not None and (use.mode, [tool.name for tool in use.tools]) == (mode, names)


def test_a_choice_without_tools_changes_nothing(parse) -> None:
    assert parse(tools=[], tool_choice="auto", parallel_tool_calls=False).request.tools is None
    assert parse(tool_choice="none", settings=ModelSettings()).request.output is None


def test_the_grammar_of_a_custom_tool(parse) -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    tool = {"type": "custom", "name": "patch", "format": lark}
    named = parse(tools=[tool], tool_choice={"type": "custom", "name": "patch"}).request
    assert named.tools is not None and named.tools.tools[0].grammar is not None
    assert named.tools.tools[0].grammar.syntax is TextSyntax.LARK
    grammar = named.prompts[0].grammar
    assert grammar is not None and (grammar.kind, grammar.source) == (GrammarKind.LARK, 'start: "a"')


def test_fields_of_text_and_reasoning(parse) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}, "verbosity": "low"}
    request = parse(text=text, reasoning={"effort": "none", "summary": "auto"}).request
    grammar = request.prompts[0].grammar
    assert grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA and request.thinking_budget == 0
    assert request.grammar_field == "text.format.schema"
    assert msgspec.json.decode(request.prompts[0].template_kwargs) == {
        "reasoning_effort": "none",
        "enable_thinking": False,
        "thinking": False,
        "verbosity": "low",
    }
    plain = parse(text={"format": {"type": "text"}}, reasoning={"effort": "high"}).request
    assert plain.prompts[0].grammar is None and b'"high"' in plain.prompts[0].template_kwargs
    any_object = parse(text={"format": {"type": "json_object"}}).request.prompts[0].grammar
    assert any_object is not None and any_object.kind is GrammarKind.JSON_OBJECT


def test_sampling_is_that_of_chat_completions(parse) -> None:
    request = parse(
        temperature=0.5, top_k=7, min_p=0.1, seed=3, stop=["x"], max_output_tokens=9, user="u", priority=2,
        cache_salt="s", repetition_penalty=1.2, ignore_eos=True, bad_words=["no"], thinking_token_budget=5,
    ).request  # fmt: skip
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.repetition_penalty) == (0.5, 7, 0.1, 1.2)
    assert (request.seed, request.text.stop, request.max_tokens, request.user, request.priority) == (
        3,
        ["x"],
        9,
        "u",
        2,
    )
    assert sampling.ignore_eos and request.cache_salt == "s" and request.thinking_budget == 5
    assert request.prompts[0].bad_words == ["no"] and request.prompt_field == "input"


def test_truncation_leaves_room_for_the_answer(parse) -> None:
    def room(**fields: Any) -> tuple[int, int]:
        request = parse(**fields).request
        return request.shortened_tokens, request.prompts[0].max_tokens

    assert room(truncation="disabled") == room() == (0, 256)
    assert room(truncation="auto", max_output_tokens=100) == (156, 256)
    assert room(truncation="auto", max_output_tokens=1000) == (128, 256)
    assert room(truncation="auto") == (224, 256)


def test_what_clients_send_and_what_has_no_effect(parse) -> None:
    parsed = parse(
        store=True, service_tier="auto", background=False, previous_response_id=None, stream_options={}, stream=True,
        context_management=[], prompt_cache_retention="24h", client_metadata={"a": "b"},
        include=["file_search_call.results"], prompt_cache_options={"mode": "implicit"},
        access_programs={}, image={}, new_field=1,
    )  # fmt: skip
    assert parsed.ignored == ["new_field"]


def test_a_large_body_is_parsed_the_same(parse) -> None:
    """Another process parses it, and sends the request back."""
    parsed = parse(
        tools=[F, {"type": "namespace", "name": "a", "tools": [PATCH]}], input=[USER, call("1"), output("1")]
    )
    data = msgspec.msgpack.encode(parsed)
    assert msgspec.msgpack.decode(data, type=ParsedGeneration) == parsed
