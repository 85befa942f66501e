from typing import Any

import llguidance
import pytest

from blockyard.shared.errors import RequestError
from blockyard.shared.grammars.format_patterns import FORMAT_PATTERNS
from blockyard.shared.tool_parsers.schema_types import ALL_TYPES, NOT_STRINGS, parameter_types
from blockyard.shared.tool_parsers.text_schemas import TextSchemas, search

TOKENIZER = llguidance.LLTokenizer("byte")
ROOT = {"$defs": {"short": {"maxLength": 3}, "unit": {"enum": ["km", "mi", 1]}, "loop": {"$ref": "#/$defs/loop"}}}


def matches(term: str | None, text: str) -> bool:
    if term is None:
        return False
    source = f'start: "<" WHOLE\nWHOLE: TEXT ">"\nTEXT: {term}\n'
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.LLMatcher.grammar_from_lark(source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(f"<{text}>".encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("x", ["x", "axb", "x\n"], ["", "a"]),
        ("^a", ["a", "ab"], ["ba"]),
        ("a$", ["a", "ba"], ["ab"]),
        ("^(ab|cd)+$", ["ab", "abcd"], ["", "xab"]),
        ("^a|b$|^c$", ["ax", "xb", "c"], ["xa", "bx", "cc"]),
        (r"^\d{2}/\w[\d\-/]$", ["12/a-", "00/_/"], ["12-a-", "\u0661\u0662/a-"]),
        (r"^[^\]/|]\|$", ["a|"], ["]|", "/|"]),
        ("^a/b\n\\/$", ["a/b\n/"], ["a/b"]),
        ("", ["", "a"], []),
        ("^$", [""], ["a"]),
        (r"\$$", ["$", "a$"], ["$a"]),
    ],
)
def test_patterns_search(pattern: str, fitting: list[str], others: list[str]) -> None:
    assert [text for text in [*fitting, *others] if matches(search(pattern), text)] == fitting


SCHEMAS: list[tuple[Any, list[str], list[str]]] = [
    (True, ["", "a\n<>&\"'"], []),
    (False, [], [""]),
    ({"type": "integer"}, [], ["1"]),
    ({"type": ["string", "null"]}, ["a"], []),
    ({"enum": ["a", 'b"\\', 3]}, ["a", 'b"\\'], ["3", "b"]),
    ({"const": "a"}, ["a"], ["b"]),
    ({"minLength": 2, "maxLength": 3}, ["éa", "東東東"], ["a", "abcd"]),
    ({"maxLength": 1, "pattern": "^[ab]*$"}, ["", "b"], ["c", "ab"]),
    ({"maxLength": 3, "pattern": "^[ab]{4}$"}, [], []),
    ({"minLength": 4, "maxLength": 6, "format": "date-time"}, [], []),
    ({"allOf": [{"format": "date"}, {"$ref": "#/$defs/short"}]}, [], []),
    ({"anyOf": [{"const": "abcd"}, {"pattern": "^.{2}$"}], "maxLength": 3}, ["ab"], ["abcd"]),
    ({"const": "abcd", "maxLength": 3}, [], []),
    ({"maxLength": 3, "pattern": "[ab]{3}"}, ["aba"], ["xaba"]),
    ({"$ref": "#/$defs/unit"}, ["km", "mi"], ["1", "m"]),
    ({"allOf": [{"minLength": 2}, {"pattern": "a"}]}, ["ab"], ["a", "bb"]),
    ({"anyOf": [{"const": "a"}, {"type": "null"}, {"minLength": 3}]}, ["a", "abc"], ["ab"]),
    ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, ["a", "b"], ["ab", "c"]),
    ({"not": {"pattern": "a"}}, ["b", ""], ["a"]),
    ({"not": {"type": "integer"}}, ["a"], []),
    ({"format": "date"}, ["2024-02-29"], ["2023-02-29", "x"]),
    ({"format": "binary", "maxLength": 2.0}, ["x", "ab"], ["abc"]),
]


@pytest.mark.parametrize(("schema", "fitting", "others"), SCHEMAS)
def test_terminals_match_valid_strings(schema: Any, fitting: list[str], others: list[str]) -> None:
    term = TextSchemas(ROOT, "f").terminal(schema)
    assert [text for text in [*fitting, *others] if matches(term, text)] == fitting


def test_what_cannot_be_enforced_is_refused() -> None:
    for schema in ({"if": {}, "then": {}}, {"format": "uri-reference"}, {"$ref": "#/$defs/loop"}):
        with pytest.raises(RequestError):
            TextSchemas(ROOT, "f").terminal(schema)


@pytest.mark.parametrize("name", FORMAT_PATTERNS)
def test_format_patterns_compile(name: str) -> None:
    assert not matches(TextSchemas({}, "f").terminal({"format": name}), "?")


def test_schemas_without_their_strings() -> None:
    schemas = TextSchemas(ROOT, "f")
    assert schemas.restricted({"type": "string"}, NOT_STRINGS) is None
    assert schemas.restricted({"enum": ["a"]}, NOT_STRINGS) is None
    assert schemas.restricted(False, NOT_STRINGS) is None
    found = schemas.restricted({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}, NOT_STRINGS)
    assert found["anyOf"] == [{"type": ["integer"], "minimum": 1}]
    found = schemas.restricted({"$ref": "#/$defs/unit"}, NOT_STRINGS)
    assert found["allOf"][0]["enum"] == [1]


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"type": "boolean"}, [True, False]),
        ({"enum": [True, 0, "false"]}, [True]),
        ({"const": None}, [None]),
        ({"anyOf": [{"type": "null"}, {"const": False}]}, [False, None]),
        ({"oneOf": [{"type": "boolean"}, {"enum": [True, None]}]}, [False, None]),
        ({"not": {"type": "null"}}, [True, False]),
        ({"allOf": [{"type": ["boolean", "null"]}, {"$ref": "#/$defs/unit"}]}, []),
    ],
)
def test_allowed_words(schema: Any, allowed: list[bool | None]) -> None:
    schemas = TextSchemas(ROOT, "f")
    assert [value for value in (True, False, None) if schemas.allows(schema, value)] == allowed


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
        ({"$ref": "#/$defs/unit"}, {"string", "integer"}),
        ({"allOf": [{"type": ["string", "array"]}, {"type": ["string", "object"]}]}, {"string"}),
        ({"const": [1]}, {"array"}),
        ({"type": "float"}, {"number", "integer"}),
        ({"type": "int"}, {"integer"}),
        ({"type": "Bool"}, {"boolean"}),
        ({"type": ["list[int]", "NoneType"]}, {"array", "null"}),
        ({"type": "dict[str, Any]"}, {"object"}),
        ({"type": "INTEGER"}, {"integer"}),
        ({"type": "any"}, ALL_TYPES),
        ({}, ALL_TYPES),
        ({"$ref": "#/nowhere"}, ALL_TYPES),
        ({"$ref": "#/$defs/loop"}, ALL_TYPES),
    ],
)
def test_types_of_parameters(schema: Any, types: set[str]) -> None:
    assert parameter_types({**ROOT, "properties": {"a": schema}}, "a") == types
    assert parameter_types({**ROOT, "allOf": [{"properties": {"a": schema}}]}, "a") == types
    assert parameter_types({**ROOT, "additionalProperties": schema}, "a") == types
