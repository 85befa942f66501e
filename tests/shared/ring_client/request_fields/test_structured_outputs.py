"""Every spelling of structured output becomes one grammar, and what is no grammar is refused by name."""

from typing import Any

import msgspec
import pytest

from blockyard.services.api_gateway.requests.schemas import ChatRequest
from blockyard.shared.errors import RequestError
from blockyard.shared.messages import MAX_GRAMMAR_BYTES, Grammar, GrammarDefaults, GrammarEngine, GrammarKind
from blockyard.shared.ring_client.request_fields.structured_outputs import (
    FieldGrammar,
    StructuredOutputsParams,
    read_grammar,
    read_structured_outputs,
)

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = msgspec.json.encode(SCHEMA).decode()
TAG = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
LARK = 'start: "a" | "b"'
GBNF = 'root ::= "a" | "b"'


DEFAULTS = GrammarDefaults()


def read(defaults: GrammarDefaults = DEFAULTS, **fields: Any) -> FieldGrammar | None:
    request = msgspec.json.decode(msgspec.json.encode(fields), type=ChatRequest)
    return read_grammar(request, defaults)


@pytest.mark.parametrize(
    ("fields", "kind", "source", "field"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            GrammarKind.JSON_SCHEMA,
            TEXT,
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_OBJECT, "", "response_format"),
        (
            {"response_format": TAG},
            GrammarKind.STRUCTURAL_TAG,
            msgspec.json.encode(TAG).decode(),
            "response_format",
        ),
        ({"structured_outputs": {"json": TEXT}}, GrammarKind.JSON_SCHEMA, TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, TEXT, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+", "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarKind.CHOICE, '["a","b"]', "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": LARK}}, GrammarKind.LARK, LARK, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": GBNF}}, GrammarKind.EBNF, GBNF, "structured_outputs.grammar"),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            GrammarKind.JSON_OBJECT,
            "",
            "structured_outputs.json_object",
        ),
        ({"guided_json": SCHEMA}, GrammarKind.JSON_SCHEMA, TEXT, "guided_json"),
        ({"guided_regex": "a|b"}, GrammarKind.REGEX, "a|b", "guided_regex"),
        ({"guided_choice": ["x"]}, GrammarKind.CHOICE, '["x"]', "guided_choice"),
        ({"guided_grammar": GBNF}, GrammarKind.EBNF, GBNF, "guided_grammar"),
        ({"guided_json_object": True}, GrammarKind.JSON_OBJECT, "", "guided_json_object"),
    ],
)
def test_each_spelling(fields: dict[str, Any], kind: GrammarKind, source: str, field: str) -> None:
    assert read(**fields) == FieldGrammar(Grammar(kind, source), field)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": None},
        {"response_format": {"type": "text"}},
        {"structured_outputs": None},
        {"guided_json_object": False},
        {"guided_decoding_backend": "xgrammar"},
    ],
)
def test_no_grammar(fields: dict[str, Any]) -> None:
    assert read(**fields) is None


def test_options_of_the_request_come_before_those_of_the_deployment() -> None:
    defaults = GrammarDefaults(engine=GrammarEngine.XGRAMMAR, any_whitespace=False, additional_properties=False)
    found = read(defaults, guided_regex="a")
    assert found is not None
    assert found.grammar == Grammar(GrammarKind.REGEX, "a", GrammarEngine.XGRAMMAR, "", False, False)
    asked = {"json": SCHEMA, "disable_any_whitespace": False, "disable_additional_properties": False}
    asked |= {"whitespace_pattern": r"\n", "backend": "outlines"}
    found = read(defaults, structured_outputs=asked)
    assert found is not None
    assert found.grammar == Grammar(GrammarKind.JSON_SCHEMA, TEXT, GrammarEngine.OUTLINES, r"\n", True, True)
    found = read(guided_json=SCHEMA, guided_decoding_backend="lm-format-enforcer", guided_whitespace_pattern=" ")
    assert found is not None
    assert found.grammar == Grammar(GrammarKind.JSON_SCHEMA, TEXT, GrammarEngine.LM_FORMAT_ENFORCER, " ")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a", "backend": "own"}}, "structured_outputs"),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "own"}, "guided_decoding_backend"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, "guided_whitespace_pattern"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "guided_regex"),
        ({"guided_json": {"description": "a" * MAX_GRAMMAR_BYTES}}, "guided_json"),
    ],
)
def test_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.field == field


def test_offline_parameters_are_the_same_fields() -> None:
    grammar = Grammar(GrammarKind.CHOICE, '["a"]')
    for value in (StructuredOutputsParams(choice=["a"]), {"choice": ["a"]}):
        found = read_structured_outputs(value, DEFAULTS)
        assert found is not None and found.grammar == grammar
    with pytest.raises(RequestError, match="exactly one"):
        read_structured_outputs(StructuredOutputsParams(), DEFAULTS)


def test_a_deeply_nested_schema_is_refused() -> None:
    with pytest.raises(RequestError, match="nested too deeply"):
        read(guided_json='{"a":' * 5000 + "1" + "}" * 5000)
