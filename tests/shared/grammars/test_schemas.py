"""Random and chosen JSON schemas: what an engine takes it enforces, and what it does not enforce it names.

Random allowed tokens write values, which jsonschema validates with its formats. The other half of this is
`tests/bench/structured_output/bench_schemas.py`, where a model writes them through all services.
"""

import json
import random
import re
from typing import Any

import pytest
from grammar_rig import ALL, ENFORCER, GUIDANCE, OUTLINES, VOCABULARY, grammar
from grammar_rig import XGRAMMAR as XG
from grammar_walks import Writer
from json_schemas import chosen_schemas, random_schema, validate, with_keywords

from blockyard.shared.grammars.engines import Engines
from blockyard.shared.grammars.interface import GrammarError, UnsupportedGrammar
from blockyard.shared.grammars.json_schemas.engine_schemas import OUTLINES as OUTLINES_TABLE
from blockyard.shared.grammars.json_schemas.engine_schemas import XGRAMMAR
from blockyard.shared.messages import GrammarEngine, GrammarKind

CHOSEN = chosen_schemas()
NUM_RANDOM = 200
# each names the keyword, or says that there is no value at all
CAUSES = re.compile(
    "(uniqueItems|oneOf|[mM](in|ax)Properties|(min|max)Items|prefixItems|allOf|multipleOf|patternProperties|beside )"
    "|names|Unsatisfiable schema: "
)


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(VOCABULARY)


def check(engines: Engines, writer: Writer, engine: GrammarEngine, schemas: dict[str, Any], num: int) -> dict[str, str]:
    """Writes and validates values of each schema. Returns the causes of those that were refused."""
    refused, num_ended = {}, 0
    for name, schema in schemas.items():
        try:
            compiled = engines.compile(grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), engine))
        except GrammarError as e:
            refused[name] = str(e)
            continue
        rng = random.Random(name)
        for text in (writer.write(compiled, rng) for _ in range(num)):
            if text is not None:
                num_ended += 1
                try:
                    validate(text, schema)
                except ValueError as e:
                    pytest.fail(f"{engine} let through {text!r} for {name}, {json.dumps(schema)}: {e}")
    assert num_ended > 0.9 * num * (len(schemas) - len(refused))
    return refused


def test_values_of_chosen_schemas_are_valid(engines: Engines, writer: Writer) -> None:
    refused = check(engines, writer, GUIDANCE, CHOSEN, 5)
    assert refused.keys() == {"oneOf that may overlap"} and "oneOf" in refused["oneOf that may overlap"]


def test_values_of_random_schemas_are_valid(engines: Engines, writer: Writer) -> None:
    schemas = {f"random {seed}": random_schema(seed) for seed in range(NUM_RANDOM)}
    refused = check(engines, writer, GUIDANCE, schemas, 3)
    assert len(refused) < 0.4 * NUM_RANDOM
    assert all(CAUSES.search(cause) for cause in refused.values()), refused


def test_values_of_xgrammar_are_valid(engines: Engines, writer: Writer) -> None:
    refused = check(engines, writer, XG, CHOSEN, 3)
    assert all(CAUSES.search(cause) for cause in refused.values()) and len(refused) < 20, refused
    schemas = {f"random {seed}": with_keywords(random_schema(seed), {*XGRAMMAR, "$defs"}) for seed in range(40)}
    refused = check(engines, writer, XG, schemas, 2)
    assert all(CAUSES.search(cause) for cause in refused.values()) and len(refused) < 30, refused


def test_values_of_outlines_are_valid(engines: Engines, writer: Writer) -> None:
    small = {name: schema for name, schema in CHOSEN.items() if not schema.keys() & {"items", "additionalProperties"}}
    del small["type object"]  # its table takes 20 s
    refused = check(engines, writer, OUTLINES, small, 3)
    assert len(refused) < 0.8 * len(small)
    schemas = {f"random {seed}": with_keywords(random_schema(seed), {*OUTLINES_TABLE, "$defs"}) for seed in range(20)}
    check(engines, writer, OUTLINES, schemas, 2)


UNSUPPORTED: dict[str, Any] = {
    "uniqueItems": True,
    "contains": {"const": 1},
    "minContains": 2,
    "not": {"type": "null"},
    "if": {"type": "null"},
    "propertyNames": {"pattern": "^a"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {"required": ["b"]}},
    "$dynamicRef": "#a",
}


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_keywords_that_an_engine_would_ignore_are_named(engines: Engines, engine: GrammarEngine, keyword: str) -> None:
    schema = {"type": "array", "items": {"type": "object", "properties": {"a": {keyword: UNSUPPORTED[keyword]}}}}
    with pytest.raises(UnsupportedGrammar, match=re.escape(keyword)):
        engines.compile(grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), engine))


BESIDE: list[tuple[GrammarEngine, dict[str, Any], str]] = [
    (XG, {"$ref": "#/$defs/t", "maxLength": 2, "$defs": {"t": {"type": "string"}}}, r"beside \$ref: maxLength"),
    (XG, {"anyOf": [{"type": "string"}], "maxLength": 2}, "beside anyOf: maxLength"),
    (XG, {"type": "string", "pattern": "a", "maxLength": 2}, "beside pattern: maxLength"),
    (XG, {"type": "string", "format": "regex"}, "regex in `format`"),
    (XG, {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    (XG, {"type": "string", "pattern": 'a"b'}, "quotes"),
    (GUIDANCE, {"type": "object", "minProperties": 2}, "minProperties"),
    (OUTLINES, {"type": "array", "prefixItems": [{"type": "null"}], "minItems": 1}, "beside prefixItems: minItems"),
    (OUTLINES, {"type": "object", "properties": {"a": {}}}, "without a type"),
    (OUTLINES, {"type": "object", "properties": {'"': {"type": "null"}}}, "quotes"),
    (OUTLINES, {"type": "string", "pattern": "^.*$"}, "any character in `pattern`"),
    (OUTLINES, {"type": "string", "format": "email"}, "email in `format`"),
    (ENFORCER, {"type": ["string", "null"], "maxLength": 2}, "list of types"),
    (ENFORCER, {"type": "object", "properties": {"a": {"const": 1}}}, "values but strings"),
    (ENFORCER, {"type": "object", "properties": {"a": {"const": '"'}}}, "quotes"),
]


@pytest.mark.parametrize(("engine", "schema", "cause"), BESIDE)
def test_combinations_that_an_engine_would_ignore_are_named(
    engines: Engines, engine: GrammarEngine, schema: dict[str, Any], cause: str
) -> None:
    with pytest.raises(UnsupportedGrammar, match=cause):
        engines.compile(grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), engine))


def test_auto_gives_xgrammar_what_it_alone_can_count(engines: Engines) -> None:
    names: dict[str, Any] = {name: {"type": "null"} for name in "abc"}
    schema = {"type": "object", "properties": names, "minProperties": 2, "additionalProperties": False}
    found = engines.resolve(grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), GrammarEngine.AUTO))
    assert found.engine == XG


# texts that the libraries alone let through, though the schema forbids them
WRONG: list[tuple[GrammarEngine, dict[str, Any], str, str]] = [
    (GUIDANCE, {"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29"'),
    (GUIDANCE, {"type": "string", "format": "hostname"}, '"a.example"', f'"{".".join(["abcdefgh"] * 30)}"'),
    (GUIDANCE, {"properties": {"a": {"type": "null"}}, "type": "object"}, '{"a":null}', '{"\\u0061":5}'),
    (XG, {"type": "string", "minLength": 2}, '"ab"', '"a\x01"'),
    (XG, {"type": "string", "maxLength": 5}, '""', '"a\x01"'),
    (XG, {"type": "string", "pattern": "^a(x[0-9]{1,3})?Z$"}, '"ax12Z"', '"a12Z"'),
    (XG, {"type": "string", "enum": ["a", 1]}, '"a"', "1"),
    (XG, {"minimum": 5}, "7", "3"),
    (XG, {"type": "string", "format": "ipv4"}, '"1.2.3.4"', '"1.2.3.04"'),
    (XG, {"type": "object", "required": ["z"], "additionalProperties": {"type": "null"}}, '{"z":null}', "{}"),
    (OUTLINES, {"type": "string", "format": "date-time"}, '"2024-02-29T00:00:00Z"', '"2024-02-30T00:00:00Z"'),
]


@pytest.mark.parametrize(("engine", "schema", "right", "wrong"), WRONG)
def test_what_libraries_let_through_is_mended(
    engines: Engines, texts: list[bytes], engine: GrammarEngine, schema: dict[str, Any], right: str, wrong: str
) -> None:
    by_text = {text: token for token, text in enumerate(texts) if len(text) == 1}
    compiled = engines.compile(grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), engine))
    for text, is_right in ((right, True), (wrong, False)):
        ids = [by_text[bytes([byte])] for byte in text.encode()]
        matcher = compiled.matcher()
        assert (matcher.accept(ids) == len(ids) and matcher.is_complete()) is is_right, text
