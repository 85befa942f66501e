"""What an engine takes it enforces: no invalid value of any kind of schema gets through, however it is spelled."""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from grammar_rig import ALL, ENFORCER, OUTLINES, grammar
from schema_kinds import KINDS

from blockyard.shared.grammars.engines import Engines
from blockyard.shared.grammars.interface import CompiledGrammar, GrammarError
from blockyard.shared.messages import GrammarEngine, GrammarKind

# jsonschema reads these as Python does: patterns, binary fractions, and formats only with further packages
READ_OTHERWISE = ("format", "multipleOf", "pattern")
# no engine of `auto` has them
NEVER = {"contains", "dependencies", "dependentRequired", "dependentSchemas", "if-then-else", "maxContains"}
NEVER |= {"minContains", "not", "propertyNames"}
SLOW = [{"type": name} for name in ("array", "object")]  # any value in them: outlines' tables take 20 s


def test_jsonschema_says_the_same_of_the_values() -> None:
    for kind, schema, valid, invalid in KINDS:
        validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
        if kind not in READ_OTHERWISE:
            assert all(map(validator.is_valid, valid)) and not any(map(validator.is_valid, invalid)), (kind, schema)


def spellings(value: Any) -> Iterator[str]:
    """Texts of a value: with blanks, without, on several lines, and with characters of strings escaped."""
    for ascii_only in (False, True):
        yield json.dumps(value, ensure_ascii=ascii_only)
        yield json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":"))
        yield json.dumps(value, ensure_ascii=ascii_only, indent=1)
    yield re.sub(r'"((?:[^"\\]|\\.)*)"', lambda text: f'"{escaped(text[1])}"', json.dumps(value))


def escaped(text: str) -> str:
    return re.sub(r"\\u....|\\.|[A-Za-z~/]", lambda c: c[0] if len(c[0]) > 1 else f"\\u{ord(c[0]):04x}", text)


class Reader:
    """Spells texts in tokens of one character, or one byte."""

    def __init__(self, texts: list[bytes]) -> None:
        self._ids = {text: token for token, text in enumerate(texts)}

    def takes(self, compiled: CompiledGrammar, value: Any) -> bool:
        """Whether a grammar takes one of the value's spellings."""
        return any(self.takes_text(compiled, text) for text in spellings(value))

    def takes_text(self, compiled: CompiledGrammar, text: str) -> bool:
        ids: list[int] = []
        for char in text:
            data = char.encode()
            ids += [self._ids[data]] if data in self._ids else [self._ids[bytes([byte])] for byte in data]
        matcher = compiled.matcher()
        return matcher.accept(ids) == len(ids) and matcher.is_complete()


def cases(engine: GrammarEngine) -> list[tuple[str, Any, list[Any], list[Any]]]:
    return [case for case in KINDS if not (engine == OUTLINES and is_slow(case[1]))]


def is_slow(schema: Any) -> bool:
    """Whether arrays or objects of any values are in it."""
    if isinstance(schema, list):
        return any(map(is_slow, schema))
    if not isinstance(schema, dict):
        return False
    is_open = {"array": {"items", "prefixItems"}, "object": {"properties", "additionalProperties"}}
    given = schema.get("type")
    asked = is_open.get(given, set()) if isinstance(given, str) else set()
    return bool(asked and not asked & schema.keys()) or any(map(is_slow, schema.values()))


@pytest.mark.parametrize("engine", ALL)
def test_invalid_values_are_never_taken(engines: Engines, texts: list[bytes], engine: GrammarEngine) -> None:
    reader = Reader(texts)
    taken: set[str] = set()
    for kind, schema, valid, invalid in cases(engine):
        try:
            compiled = engines.compile(grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), engine))
        except GrammarError:
            continue
        taken.add(kind)
        for value in invalid:
            assert not reader.takes(compiled, value), f"{engine} takes {value!r} for {json.dumps(schema)}"
        if engine == ENFORCER and not json.dumps(schema, ensure_ascii=False).isascii():
            continue  # it writes no characters of several tokens
        assert any(reader.takes(compiled, value) for value in valid), f"{engine} takes nothing for {json.dumps(schema)}"
    assert {"anchor", "const", "definitions", "enum", "properties", "ref", "type", "unevaluatedProperties"} <= taken


@pytest.mark.parametrize(
    "pattern", ["^a|b$", r"^\S{2}$", "^[^é]{2}$", "^[^à-ü]x$", "^[ -\uffff]{2}$", "^[A-z]b$", r"^[\s\S]b$"]
)
def test_a_pattern_stays_within_its_quotes(engines: Engines, texts: list[bytes], pattern: str) -> None:
    reader = Reader(texts)
    for engine in ALL:
        schema = json.dumps({"type": "string", "pattern": pattern})
        try:
            compiled = engines.compile(grammar(GrammarKind.JSON_SCHEMA, schema, engine))
        except GrammarError:
            continue
        for text in ('"a', 'b"', '"b""', '"""', '"\\x"', '"\\b"', '"\n""', '"b\n"'):
            assert not reader.takes_text(compiled, text), (engine, text)


@pytest.mark.parametrize("engine", ALL)
def test_patterns_that_all_engines_take(engines: Engines, engine: GrammarEngine, texts: list[bytes]) -> None:
    for pattern, value in (("^ab$", "ab"), ("a|b", "b"), ("^a\\$", "a$"), ("^[a-z]{2}$", "xy"), ("^(a|b)$", "b")):
        schema = json.dumps({"type": "string", "pattern": pattern})
        assert Reader(texts).takes(engines.compile(grammar(GrammarKind.JSON_SCHEMA, schema, engine)), value), pattern


@pytest.mark.parametrize("engine", ALL)
def test_no_text_is_no_number(engines: Engines, engine: GrammarEngine) -> None:
    schema = json.dumps({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-7})
    with contextlib.suppress(GrammarError):
        assert not engines.compile(grammar(GrammarKind.JSON_SCHEMA, schema, engine)).matcher().is_complete()


def test_auto_refuses_only_kinds_that_no_engine_has(engines: Engines) -> None:
    refused: dict[str, list[bool]] = {}
    for kind, schema, valid, _ in KINDS:
        source = grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), GrammarEngine.AUTO)
        try:
            engines.resolve(source)
            refused.setdefault(kind, []).append(False)
        except GrammarError as e:
            assert str(e)
            if valid:  # a schema that allows nothing is refused, too
                refused.setdefault(kind, []).append(True)
    assert {kind for kind, ones in refused.items() if all(ones)} == NEVER
    assert {kind for kind, ones in refused.items() if any(ones)} - NEVER == {
        "dynamicRef",
        "format",
        "oneOf",
        "pattern",
        "ref",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
