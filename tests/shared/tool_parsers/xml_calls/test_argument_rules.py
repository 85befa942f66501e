import json
from typing import Any

import llguidance
import pytest

from blockyard.shared.errors import RequestError
from blockyard.shared.output_parsing.parts import PartKind
from blockyard.shared.output_parsing.reader import read_all
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules
from blockyard.shared.tool_parsers.tools import TextGrammar, TextSyntax, Tool, ToolKind
from blockyard.shared.tool_parsers.xml_calls.families import QWEN3_CODER

TOKENIZER = llguidance.LLTokenizer("byte")


def matcher(tool: Tool) -> llguidance.LLMatcher:
    rules = GrammarRules()
    source = rules.source(QWEN3_CODER.write_grammar(rules, [tool], False))
    source += "".join(f"marker_{i}: {json.dumps(text)}\n" for i, text in enumerate(rules.markers))
    found = llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_lark(source), log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def accepted(tool: Tool, **values: str) -> Any:
    """The arguments that an answer with these values has. None if the grammar does not allow it."""
    arguments = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function={tool.name}>\n{arguments}</function>\n</tool_call>"
    tokens, state = list(text.encode()), matcher(tool)
    if state.try_consume_tokens(tokens) != len(tokens) or not state.is_accepting():
        return None
    parts = read_all(lambda text: QWEN3_CODER.read(text, [tool]), text)
    return json.loads("".join(part.text for part in parts if part.kind == PartKind.ARGUMENTS))


def with_argument(schema: Any, **more: Any) -> Tool:
    return Tool(ToolKind.FUNCTION, "f", {"type": "object", "properties": {"a": schema}, "required": ["a"], **more})


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
VALUES: list[tuple[Any, str, Any]] = [  # schema, text, and its value or None
    ({"type": "string"}, "12", "12"),
    ({"type": "string"}, "a\n<b>\n", "a\n<b>\n"),
    ({"type": "string"}, "a</parameter>b", None),
    ({"type": "string", "maxLength": 2}, "abc", None),
    ({"type": "integer", "minimum": 5}, "7", 7),
    ({"type": "integer", "minimum": 5}, "4", None),
    ({"type": "integer"}, "a", None),
    ({"type": "boolean"}, "true", True),
    ({"type": "array", "items": {"type": "string"}}, '["</parameter>"]', ["</parameter>"]),
    ({"type": "array"}, "[1", None),
    (NULLABLE, "no", "no"),
    (NULLABLE, "nullable", "nullable"),
    (NULLABLE, "12", "12"),
    ({"enum": ["true", True]}, "true", True),
    ({"enum": ["false", True]}, "false", None),  # it would be read as a boolean
    ({"type": ["string", "integer"]}, "7 a", "7 a"),
    ({"type": ["string", "integer"]}, "7", 7),
    ({"type": ["string", "integer"]}, "7.5", "7.5"),
    ({"type": ["string", "integer"], "minimum": 5}, "7", 7),
    ({"type": ["string", "integer"], "minimum": 5}, "4", None),
    ({"type": ["string", "object"]}, '{"a": 1}', {"a": 1}),
    ({"type": ["string", "object"]}, "a {", "a {"),
    ({"type": ["string", "object"]}, "{a", None),
    (True, "[1]", [1]),
    (True, "text", "text"),
    ({"$ref": "#/$defs/unit"}, "km", "km"),
    ({"$ref": "#/$defs/unit"}, "m", None),
    ({"type": "array", "items": {"$ref": "#/$defs/unit"}}, '["km"]', ["km"]),
    ({"type": "array", "items": {"$ref": "#/$defs/unit"}}, '["m"]', None),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_values_that_are_valid_are_allowed(schema: Any, text: str, value: Any) -> None:
    tool = with_argument(schema, **{"$defs": {"unit": {"enum": ["km", "mi"]}}})
    assert accepted(tool, a=text) == (None if value is None else {"a": value})


def test_null_is_a_word() -> None:
    assert accepted(with_argument(NULLABLE), a="null") == {"a": None}


def test_required_arguments_come_in_order() -> None:
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "string"}}
    tool = Tool(ToolKind.FUNCTION, "f", {"properties": properties, "required": ["b", "d"]})
    assert accepted(tool, a="1", b="x", d="1") == {"a": 1, "b": "x", "d": 1}
    assert accepted(tool, b="x", c="y", d="z") == {"b": "x", "c": "y", "d": "z"}
    for wrong in ({"a": "1", "d": "1"}, {"b": "x", "a": "1", "d": "1"}, {"b": "x"}, {"b": "x", "d": "1", "e": "2"}):
        assert accepted(tool, **wrong) is None


def test_numbers_of_arguments() -> None:
    properties = {name: {"type": "string"} for name in "abcd"}
    schema = {"properties": properties, "required": ["c"], "minProperties": 2, "maxProperties": 3}
    tool = Tool(ToolKind.FUNCTION, "f", schema)
    for names, allowed in (("c", False), ("ac", True), ("cd", True), ("abc", True), ("abcd", False), ("ab", False)):
        assert (accepted(tool, **dict.fromkeys(names, "x")) is not None) == allowed, names


def test_choices_and_patterns_at_the_top() -> None:
    properties = {"x_a": {"type": "string"}, "b": {"type": "string"}}
    choices = [{"required": ["x_a"]}, {"required": ["b"]}]
    patterns = {"^x_": {"maxLength": 2}, "b$": {"minLength": 2}}
    tool = Tool(ToolKind.FUNCTION, "f", {"properties": properties, "anyOf": choices, "patternProperties": patterns})
    assert accepted(tool, x_a="ab") == {"x_a": "ab"}
    assert accepted(tool, b="abc") == {"b": "abc"}
    for wrong in ({}, {"x_a": "abc"}, {"b": "a"}):
        assert accepted(tool, **wrong) is None


def test_custom_tools_have_one_text() -> None:
    schema = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    tool = Tool(ToolKind.CUSTOM, "c", schema, grammar=TextGrammar(TextSyntax.REGEX, "[0-9]+|x"))
    assert accepted(tool, input="12") == {"input": "12"}
    assert accepted(tool, input="a") is None


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"dependentRequired": {"a": ["b"]}},
        {"properties": {"a": False}, "required": ["a"]},
        {"properties": {"a>b": {"type": "string"}}, "required": ["a>b"]},
        {"properties": {"a": {"type": "string", "format": "idn-hostname"}}},
        {"required": ["a"], "additionalProperties": False},
        {"properties": {}, "minProperties": 1},
    ],
)
def test_what_cannot_be_written_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as e:
        QWEN3_CODER.write_grammar(GrammarRules(), [Tool(ToolKind.FUNCTION, "plant", schema)], False)
    assert e.value.field == "tools" and "plant" in str(e.value)
