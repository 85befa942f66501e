"""Sources that strangers send: options of engines, escapes, formats, and what the next engine takes."""

import json
from typing import Any

import pytest
from grammar_rig import ALL, GUIDANCE, grammar
from grammar_rig import XGRAMMAR as XG
from test_schema_kinds import Reader

from blockyard.shared.grammars.engines import Engines
from blockyard.shared.grammars.interface import GrammarError
from blockyard.shared.grammars.json_schemas.normal_form import normal_schema
from blockyard.shared.messages import GrammarEngine, GrammarKind

AUTO = GrammarEngine.AUTO
CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OPTIONS = {"x-guidance": {"key_separator": "=", "item_separator": ";", "whitespace_pattern": "_", "lenient": True}}


def takes(engines: Engines, texts: list[bytes], kind: GrammarKind, source: Any, text: str) -> bool:
    """Whether the grammar, by the first engine that takes it, takes a text."""
    found = engines.resolve(grammar(kind, source if isinstance(source, str) else json.dumps(source), AUTO))
    return Reader(texts).takes_text(engines.compile(found), text)


@pytest.mark.parametrize("engine", ALL)
def test_a_schema_sets_no_options_of_an_engine(engines: Engines, texts: list[bytes], engine: GrammarEngine) -> None:
    reader = Reader(texts)
    for schema, begin, end in ((CLOSED, "", ""), ({"type": "array", "items": CLOSED}, "[", "]")):
        options = json.dumps({**schema, **OPTIONS, "items": {**CLOSED, **OPTIONS}} if begin else {**schema, **OPTIONS})
        compiled = engines.compile(grammar(GrammarKind.JSON_SCHEMA, options, engine))
        assert reader.takes_text(compiled, f'{begin}{{"a":1}}{end}')
        assert not reader.takes_text(compiled, f'{begin}{{"a"=1}}{end}')
    for keyword in ({"uniqueItems": True}, {"not": {}}, {"contains": {}}):
        with pytest.raises(GrammarError, match=next(iter(keyword))):
            engines.compile(
                grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", **keyword, **OPTIONS}), engine)
            )


@pytest.mark.parametrize("kind", [GrammarKind.LARK, GrammarKind.EBNF])  # Lark is taken for both
def test_lark_sets_no_options_of_an_engine(engines: Engines, texts: list[bytes], kind: GrammarKind) -> None:
    for between in (" ", "\n  "):
        schema = json.dumps({**CLOSED, **OPTIONS}, indent=1 if "\n" in between else None)
        source = f'start: "/" /[^%"]%json{{/? "\\"%json" %json{between}{schema} // %json {{'.replace("{/", "/")
        assert takes(engines, texts, kind, source, '/"%json{"a":1}')
        assert not takes(engines, texts, kind, source, '/"%json{"a"=1}')
    assert takes(engines, texts, kind, '%llguidance {}\nstart: "a"', "a")
    for source in (
        '%llguidance {"no_forcing": true}\nstart: "a"',
        'start: "a"\n%llguidance\n{"allow_invalid_utf8":true}',
    ):
        with pytest.raises(GrammarError, match="requests may not configure an engine"):
            engines.resolve(grammar(kind, source, AUTO))
    lenient = f"start: v\nv: %json\n{json.dumps({'type': 'array', 'uniqueItems': True, **OPTIONS})}"
    with pytest.raises(GrammarError, match="uniqueItems"):
        engines.resolve(grammar(kind, lenient, AUTO))
    for broken in ("start: %json {", 'start: %json {"const": NaN}', "start: %json"):
        with pytest.raises(GrammarError, match="not followed by valid JSON"):
            engines.resolve(grammar(kind, broken, AUTO))


FORMATS = {  # the engine that takes each
    GUIDANCE: "date-time date time duration email idn-email hostname ipv4 ipv6 uuid uri iri json-pointer "
    "relative-json-pointer binary byte url password int32 path ipv4network json-string multi-host-uri",
    XG: "uri-reference iri-reference uri-template",
}


def test_a_format_goes_to_the_engine_that_has_it(engines: Engines) -> None:
    for engine, names in FORMATS.items():
        for name in names.split():
            schema = json.dumps({"properties": {"a": {"type": "string", "format": name}}})
            assert engines.resolve(grammar(GrammarKind.JSON_SCHEMA, schema, AUTO)).engine == engine, name
    with pytest.raises(GrammarError, match="guidance does not support regex in `format`"):
        engines.resolve(grammar(GrammarKind.JSON_SCHEMA, '{"type": "string", "format": "regex"}', AUTO))


EBNF: list[tuple[str, list[str], list[str]]] = [
    ('root ::= "\\u00fc"', ["ü"], ["u", "fc"]),
    ("root ::= [\\u00e0-\\u00ff]", ["à", "ÿ"], ["a", "ß"]),
    ("root ::= [^\\u0041-\\u005a]", ["a"], ["B"]),
    ('root ::= "\\x41\\u0022\\U0001F389\\\\u00fc"', ['A"🎉\\u00fc'], ["A"]),
    ("root ::= [\\x5d\\u005b]", ["]", "["], ["5"]),
    ('start ::= "a"\nroot ::= start', ["a"], ["b"]),  # the first engine takes it for Lark
    ('root ::= "\\ud83d\\ude00"', ["😀"], ["?"]),
    ('root ::=\n  "a" | b # c ::=\nb ::= "::="', ["a", "::="], [""]),
    ('# c ::=\nroot ::= "a" |', ["a", ""], ["b"]),
]


@pytest.mark.parametrize(("source", "right", "wrong"), EBNF)
def test_ebnf(engines: Engines, texts: list[bytes], source: str, right: list[str], wrong: list[str]) -> None:
    for text, is_right in [*((text, True) for text in right), *((text, False) for text in wrong)]:
        assert takes(engines, texts, GrammarKind.EBNF, source, text) is is_right, text


@pytest.mark.parametrize("source", ["root ::=", "root ::= # nothing\n\n", "root ::= a\na ::=", 'a ::=\nroot ::= "b"'])
def test_a_rule_without_a_body_is_refused(engines: Engines, source: str) -> None:
    with pytest.raises(GrammarError, match=r"rule (root|a) of the EBNF grammar has nothing behind its ::="):
        engines.resolve(grammar(GrammarKind.EBNF, source, AUTO))


@pytest.mark.parametrize(
    "part",
    [
        {"description": "\x01 and \\u0061"},
        {"x-note": ["\x01"]},
        {"enum": ["\\u0061"]},
        {"type": "string", "pattern": "^\\u00e9$"},
        {"const": "\x01"},
        {"type": "string", "pattern": "^\\x01$"},
    ],
)
def test_no_text_lifts_the_ban_of_escaped_names(engines: Engines, texts: list[bytes], part: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}, "b": part}}
    try:
        assert not takes(engines, texts, GrammarKind.JSON_SCHEMA, schema, '{"\\u0061":5}')
    except GrammarError as e:
        assert "pattern" in part and "control characters" in str(e)


def test_names_that_look_like_others_are_refused_for_xgrammar(engines: Engines, texts: list[bytes]) -> None:
    open_, reader = {"type": "object", "properties": {"a": {"type": "null"}, "c/d": {"type": "null"}}}, Reader(texts)
    compiled = engines.compile(grammar(GrammarKind.JSON_SCHEMA, json.dumps(open_), XG))
    assert reader.takes_text(compiled, '{"a":null,"b\\n":"\\"\\\\"}')
    for text in ('{"\\u0061":5}', '{"c\\/d":5}', '{"c\\u002fd":5}'):
        assert not reader.takes_text(compiled, text)


TAG = {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True}
IN_TAGS = [
    {"structures": [{"begin": "<f>", "schema": TAG, "end": "</f>"}], "triggers": ["<f>"]},
    {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<f>",
            "content": {"type": "json_schema", "json_schema": TAG},
            "end": "</f>",
        },
    },
    {
        "type": "structural_tag",  # a token by its text, which only a vocabulary knows
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "const_string", "value": "<f>"},
                {"type": "json_schema", "json_schema": TAG},
                {"type": "const_string", "value": "</f>"},
                {"type": "optional", "content": {"type": "token", "token": "return"}},
            ],
        },
    },
    {
        "type": "structural_tag",  # the same in front
        "format": {
            "type": "sequence",
            "elements": [
                {"type": "optional", "content": {"type": "token", "token": "return"}},
                {"type": "const_string", "value": "<f>"},
                {"type": "json_schema", "json_schema": TAG},
                {"type": "const_string", "value": "</f>"},
            ],
        },
    },
]


@pytest.mark.parametrize("tag", IN_TAGS, ids=["older", "tag", "token", "token first"])
def test_names_within_structural_tags_are_not_escaped(
    engines: Engines, texts: list[bytes], tag: dict[str, Any]
) -> None:
    reader = Reader(texts)
    compiled = engines.compile(grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag), XG))
    for right in ('{"a":null}', '{"b\\n":"\\"\\\\"}', '{"b":1}'):
        assert reader.takes_text(compiled, f"<f>{right}</f>"), right
    for wrong in ('{"\\u0061":5}', '{"a":5}', '{"\\u0062":1}'):
        assert not reader.takes_text(compiled, f"<f>{wrong}</f>"), wrong


def test_rules_of_a_client_within_structural_tags_are_kept(engines: Engines, texts: list[bytes]) -> None:
    source = 'root ::= my_basic_escape\nmy_basic_escape ::= "a" | "b"'
    tag = {"type": "structural_tag", "format": {"type": "grammar", "grammar": source}}
    compiled = engines.compile(grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag), XG))
    assert Reader(texts).takes_text(compiled, "b") and not Reader(texts).takes_text(compiled, "n")


@pytest.mark.parametrize(
    "source",
    [
        {"maxLength": 1.5},
        {"maxLength": "5"},
        {"minimum": "a"},
        {"required": True},
        {"type": "any"},
        {"enum": 1},
        {"items": 5},
        {"anyOf": []},
        {"properties": []},
        {"pattern": None},
        {"multipleOf": 0},
        {"minItems": -1},
        {"$ref": 1},
        {"$ref": "#/no"},
        {"$ref": "#no"},
        {"$ref": "http://x.test/no"},
        {"$ref": "http://["},
    ],
)
def test_a_keyword_with_a_wrong_value_is_refused(engines: Engines, source: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="JSON schema"):
        engines.resolve(grammar(GrammarKind.JSON_SCHEMA, json.dumps({"items": source}), AUTO))


def test_many_references_to_large_parts_are_bounded() -> None:
    part: dict[str, Any] = {"anyOf": [{"type": "null"}] * 500}
    for _ in range(100):
        part = {"properties": {"a": part}}
    pointers = ["#" + "/properties/a" * depth for depth in range(1, 100)]
    with pytest.raises(GrammarError, match="more than 50000 schemas"):
        normal_schema({**part, "allOf": [{"$ref": pointer} for pointer in pointers] * 2})
