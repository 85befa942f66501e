"""Tools of chat requests: each spelling of a choice, what is refused by name, and the grammar of forced calls."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from tokenizers import Tokenizer

from blockyard.services.api_gateway.requests.schemas import ChatRequest
from blockyard.shared.errors import RequestError
from blockyard.shared.grammars.guidance import GuidanceEngine
from blockyard.shared.grammars.interface import Vocabulary
from blockyard.shared.messages import GrammarDefaults, GrammarKind, ToolDefaults
from blockyard.shared.ring_client.request_fields.forced_calls import MAX_CALLS, forced_grammar
from blockyard.shared.ring_client.request_fields.tools import MAX_TOOLS, ToolMode, ToolUse, read_tools

TOKENIZER = Path(__file__).parents[4] / "shared/demo_model/tokenizer.json"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | fields}


def custom(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name} | fields}


TOOLS = [function("weather", strict=True, description="Now."), function("time"), custom("run", description="Code.")]


def read(exclude: bool = False, **fields: Any) -> ToolUse | None:
    request = msgspec.json.decode(msgspec.json.encode(fields), type=ChatRequest)
    return read_tools(request, ToolDefaults(exclude_when_none=exclude))


def used(**fields: Any) -> ToolUse:
    use = read(**fields)
    assert use is not None
    return use


def pick(name: str, kind: str = "function") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [pick(name) for name in names]}}


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, ToolMode.AUTO, ["weather", "time", "run"]),
        ("auto", ToolMode.AUTO, ["weather", "time", "run"]),
        ("none", ToolMode.NONE, []),
        ("required", ToolMode.REQUIRED, ["weather", "time", "run"]),
        (pick("time"), ToolMode.NAMED, ["time"]),
        (pick("run", "custom"), ToolMode.NAMED, ["run"]),
        (allowed("auto", "time"), ToolMode.AUTO, ["time"]),
        (allowed("required", "time", "weather"), ToolMode.REQUIRED, ["weather", "time"]),
    ],
)
def test_choices(choice: Any, mode: ToolMode, names: list[str]) -> None:
    use = used(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    assert (use.mode, [tool.name for tool in use.tools], use.parallel) == (mode, names, False)
    shown = json.loads(use.template_tools)  # all tools, whatever the answer may call
    assert [tool["function"]["name"] for tool in shown] == ["weather", "time", "run"]
    assert shown[0]["function"] == {"name": "weather", "parameters": SCHEMA, "description": "Now."}
    assert shown[2]["function"]["parameters"]["required"] == ["input"]


def test_tools_that_the_model_may_not_call_are_left_out_of_the_prompt_on_demand() -> None:
    assert used(tools=TOOLS, tool_choice="none", exclude=True).template_tools == b""
    assert used(tools=TOOLS, tool_choice="required", exclude=True).template_tools != b""


def test_the_older_fields_are_the_same_tools() -> None:
    functions = [tool["function"] for tool in TOOLS[:2]]
    use = used(functions=functions, function_call={"name": "time"})
    assert (use.mode, [tool.name for tool in use.tools], use.older) == (ToolMode.NAMED, ["time"], True)
    assert use.template_tools == used(tools=TOOLS[:2]).template_tools
    assert used(functions=functions).mode == ToolMode.AUTO
    assert read(functions=[], function_call="none") is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": {"type": "function"}}, "tools"),
        ({"tools": "weather"}, "tools"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function("f"), function("get weather")]}, "tools[1].function.name"),
        ({"tools": [function("")]}, "tools[0].function.name"),
        ({"tools": [function("f"), function("f")]}, "tools[1].function.name"),
        ({"tools": [function("f", description=5)]}, "tools[0].function.description"),
        ({"tools": [function("f", strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [function("f", parameters="object")]}, "tools[0].function.parameters"),
        ({"tools": [function("f", parameters={"type": "string"})]}, "tools[0].function.parameters"),
        (
            {"tools": [function("f", parameters={"properties": {"a": {"type": "text"}}})]},
            "tools[0].function.parameters.properties.a.type",
        ),
        ({"tools": [function("f", parameters={"properties": [1]})]}, "tools[0].function.parameters.properties"),
        ({"tools": [function("f", parameters={"required": "a"})]}, "tools[0].function.parameters.required"),
        (
            {"tools": [function("f", parameters={"properties": {"a": {"anyOf": [7]}}})]},
            "tools[0].function.parameters.properties.a.anyOf[0]",
        ),
        ({"tools": [custom("c", format={"type": "grammar"})]}, "tools[0].custom.format.grammar"),
        ({"tools": [custom("c", format={"type": "xml"})]}, "tools[0].custom.format"),
        ({"tools": [function(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": [function("f", description="x" * (2 << 20))]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": pick("missing")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": pick("run")}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("auto")}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "missing")}, "tool_choice.allowed_tools.tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [], "tool_choice": pick("f")}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions"),
        ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name"),
        ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call"),
    ],
)
def test_wrong_tools_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as e:
        read(**fields)
    assert (e.value.field, e.value.status) == (field, 400)


def test_a_schema_of_many_levels_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"properties": {"a": schema}}
    with pytest.raises(RequestError, match="in one another"):
        read(tools=[function("f", parameters=schema)])


def test_1000_tools_are_taken() -> None:
    assert len(used(tools=[function(f"f{i}") for i in range(1000)]).tools) == 1000


def grammar_of(**fields: Any) -> Any:
    return forced_grammar(used(**fields), GrammarDefaults())


def test_nothing_is_forced_where_the_model_decides() -> None:
    assert grammar_of(tools=TOOLS) is None
    assert grammar_of(tools=TOOLS, tool_choice="none") is None


def test_a_named_function_is_its_arguments() -> None:
    found = grammar_of(tools=TOOLS, tool_choice=pick("weather"))
    assert (found.grammar.kind, json.loads(found.grammar.source)) == (GrammarKind.JSON_SCHEMA, SCHEMA)


def test_a_named_custom_tool_is_its_text() -> None:
    format_: dict[str, Any] = {"type": "grammar", "grammar": {"syntax": "lark", "definition": 'start: "a"'}}
    tools = [custom("c", format=format_), custom("free")]
    found = grammar_of(tools=tools, tool_choice=pick("c", "custom"))
    assert (found.grammar.kind, found.grammar.source) == (GrammarKind.LARK, 'start: "a"')
    assert grammar_of(tools=tools, tool_choice=pick("free", "custom")) is None
    assert '"^(?:(?:a))$"' in grammar_of(tools=tools, tool_choice="required").grammar.source
    format_["grammar"]["definition"] = 'start: "(" start? ")"'
    with pytest.raises(RequestError, match="Lark"):  # cannot be enforced inside of a JSON string
        grammar_of(tools=tools, tool_choice="required")


def test_required_calls_are_a_list_with_each_tool_and_its_own_definitions() -> None:
    schema = {
        "type": "object",
        "properties": {"tree": {"$ref": "#/$defs/node"}},
        "required": ["tree"],
        "$defs": {"node": {"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}}}},
    }
    other = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "$defs": {"node": {"type": "integer"}}}
    tools = [function("plant", parameters=schema), function("count", parameters=other)]
    calls = json.loads(grammar_of(tools=tools, tool_choice="required").grammar.source)
    assert calls["maxItems"] == MAX_CALLS
    plant = {"name": "plant", "parameters": {"tree": {"child": {"child": {}}}}}
    jsonschema.validate([plant, {"name": "count", "parameters": {"n": 5}}], calls)
    for wrong in (
        [],
        [{"name": "count", "parameters": {"n": {}}}],
        [{"name": "plant", "parameters": {"tree": 5}}],
        [{"name": "other", "parameters": {}}],
        [{"name": "count"}],
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, calls)
    single = json.loads(grammar_of(tools=tools, tool_choice="required", parallel_tool_calls=False).grammar.source)
    assert single["maxItems"] == 1
    assert schema["properties"]["tree"] == {"$ref": "#/$defs/node"}  # the request's own schema is as it was


def test_an_engine_takes_required_calls_with_references() -> None:
    node = {"type": "object", "properties": {"child": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    schema = {"properties": {"tree": {"$ref": "#/$defs/node"}}, "required": ["tree"], "$defs": {"node": node}}
    found = grammar_of(tools=[function("plant", parameters=schema), function("time")], tool_choice="required")
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    engine = GuidanceEngine(Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), [1]))
    compiled = engine.compile(found.grammar)
    for text, is_whole in (
        ('[{"name": "plant", "parameters": {"tree": {"child": {}}}}]', True),
        ('[{"name": "time", "parameters": {"city": "x"}}, {"name": "plant", "parameters": {"tree": {}}}]', True),
        ('[{"name": "time", "parameters": {"tree": {}}}]', False),
        ('[{"name": "plant", "parameters": {"tree": {"other": 1}}}]', False),
        ("[]", False),
    ):
        ids, matcher = tokenizer.encode(text, add_special_tokens=False).ids, compiled.matcher()
        assert (matcher.accept(ids) == len(ids) and matcher.is_complete()) == is_whole, text


def test_tools_whose_grammar_is_too_long_are_refused() -> None:
    names = {f"property{i}": {"type": "string", "description": "x" * 1000} for i in range(1000)}
    with pytest.raises(RequestError) as e:
        grammar_of(tools=[function("f", parameters={"properties": names})], tool_choice="required")
    assert e.value.field == "tools"


def test_types_of_python_are_those_of_json() -> None:
    """Templates show a tool as the client sent it; the grammar and the parsers know its types."""
    given = {
        "type": "dict",
        "properties": {
            "a": {"type": "float"},
            "b": {"type": ["list", "None"], "items": {"type": "int"}},
            "c": {"anyOf": [{"type": "any"}, {"type": "bool"}], "default": {"type": "float"}},
            "type": {"type": "str"},
        },
    }
    use = used(tools=[function("f", parameters=given)], tool_choice="required")
    assert use.tools[0].parameters == {
        "type": "object",
        "properties": {
            "a": {"type": "number"},
            "b": {"type": ["array", "null"], "items": {"type": "integer"}},
            "c": {"anyOf": [{}, {"type": "boolean"}], "default": {"type": "float"}},
            "type": {"type": "string"},
        },
    }
    assert json.loads(use.template_tools)[0]["function"]["parameters"] == given
