"""Writes the grammar of a call's arguments where each stands alone, from the schema of the object that they make up."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from blockyard.shared.errors import RequestError
from blockyard.shared.tool_parsers.grammar_rules import GrammarRules, any_of
from blockyard.shared.tool_parsers.schema_types import (
    NESTED,
    NOT_STRINGS,
    NUMBERS,
    listed,
    named_types,
    parameter_types,
    resolve,
    type_of,
    types_of,
)
from blockyard.shared.tool_parsers.text_schemas import TextSchemas, both, either, quoted, search, without

MAX_CHOICES = 32  # of parts in `anyOf` and of patterns for names, which multiply
MAX_COUNTED_ARGUMENTS = 60  # of a tool with minProperties or maxProperties
NOT_SPLIT = ("oneOf", "not", "if", "dependentRequired", "dependentSchemas", "propertyNames", "unevaluatedProperties")
WORDS = (("true", True), ("false", False), ("null", None))
SPACE = "[ \\t\\r\\n]*"
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated"})


class NamedArgument(NamedTuple):
    name: str
    schema: Any
    name_term: str | None = None  # matches the name or nothing, where patterns for names decide on the schema


class _Shape(NamedTuple):
    """Schemas that one object has to satisfy together."""

    parts: tuple[dict[str, Any], ...]

    def joined(self, other: "_Shape") -> "_Shape":
        return _Shape(self.parts + other.parts)


class ArgumentRules:
    """The arguments of one tool. `told_apart`: the format says which values are strings."""

    def __init__(self, rules: GrammarRules, schema: dict[str, Any], tool: str, told_apart: bool = False) -> None:
        self._rules, self._root, self._tool, self._told_apart = rules, schema, tool, told_apart
        self._schemas = TextSchemas(schema, tool)

    def in_order(self, write: Callable[[NamedArgument], str | None]) -> str:
        """The expression for all arguments in the order of the schema. Optional ones may be left out.

        `write` returns the expression for one, or None if it cannot be written. Raises RequestError.
        """
        written = [self._sequence(shape, write) for shape in self._shapes(self._root, 0)]
        possible = [one for one in written if one is not None]
        if not possible:
            raise self._refusal("no arguments that are valid can be written in this model's format")
        return any_of(possible)

    def values(self, argument: NamedArgument) -> tuple[str | None, str | None]:
        """A terminal for values in text, and a rule for values in JSON."""
        schema = argument.schema
        if not types_of(schema, self._root):
            return None, None
        types = parameter_types(self._root, argument.name)
        text = self._schemas.terminal(schema) if "string" in types else None
        if text is None or self._told_apart:
            return text, self._json(schema, types & NOT_STRINGS if "string" in types else None)
        if types == {"string"}:
            return text, None
        return self._text_beside_others(schema, types, text)

    def _text_beside_others(self, schema: Any, types: frozenset[str], text: str) -> tuple[str | None, str | None]:
        """A terminal is read as far as it goes. So words are in that of the text, and JSON begins unlike any text."""
        words, excluded, as_json = list[str](), list[str](), frozenset[str]()
        for word, value in WORDS:
            if type_of(value) in types:
                if self._schemas.allows(schema, value):
                    words.append(quoted(word))
                else:
                    excluded.append(f"/{SPACE}({word}|{'None' if value is None else word.title()}){SPACE}/")
        if types & NUMBERS:
            numbers = self._schemas.restricted(schema, NUMBERS)
            if _is_plain(numbers, types & NUMBERS):
                fraction = "(\\.[0-9]{1,9})?" if "number" in types else ""
                words.append(f"/-?(0|[1-9][0-9]{{0,14}}){fraction}/")
            else:
                as_json |= NUMBERS
                excluded.append(f"/{SPACE}[-0-9](?s:.*)/")
        if types & NESTED:
            as_json |= NESTED
            excluded.append(f"/{SPACE}[\\[{{](?s:.*)/")
        term = either([without(text, either(excluded)), *words])
        return term, self._json(schema, as_json & types)

    def _json(self, schema: Any, types: frozenset[str] | None) -> str | None:
        """A rule for the schema's values, all or of these types."""
        if types is not None:
            schema = self._schemas.restricted(schema, types) if types else None
        if schema is None or schema is False:
            return None
        if isinstance(schema, dict) and b'"$ref"' in msgspec.json.encode(schema):
            schema = {**schema, **{key: self._root[key] for key in ("$defs", "definitions") if key in self._root}}
        return self._rules.json(schema)

    def _shapes(self, schema: Any, depth: int) -> list[_Shape]:
        """The ways to satisfy the schema of an object."""
        if not isinstance(schema, dict) or "object" not in named_types(schema.get("type")) or depth > MAX_CHOICES:
            return [] if schema is False or depth > MAX_CHOICES else [_Shape(())]
        for keyword in NOT_SPLIT:
            if keyword in schema:
                raise self._refusal(f"{keyword} at the top cannot be enforced in this model's format")
        factors = [[_Shape((schema,))], *(self._shapes(part, depth + 1) for part in listed(schema, "allOf"))]
        if "$ref" in schema:
            factors.append(self._shapes(resolve(self._root, schema["$ref"]), depth + 1))
        if listed(schema, "anyOf"):
            factors.append([shape for part in schema["anyOf"] for shape in self._shapes(part, depth + 1)])
        shapes = [_Shape(())]
        for factor in factors:
            shapes = [shape.joined(one) for shape in shapes for one in factor]
            if len(shapes) > MAX_CHOICES:
                raise self._refusal(f"anyOf at the top leaves more than {MAX_CHOICES} choices")
        return shapes

    def _sequence(self, shape: _Shape, write: Callable[[NamedArgument], str | None]) -> str | None:
        blocks: list[tuple[str, bool]] = []
        for name, required in _names(shape).items():
            written = [write(one) for one in self._arguments(shape, name)]
            possible = [one for one in written if one is not None]
            if possible:
                blocks.append((any_of(possible), required))
            elif required:
                return None
        least = max((part.get("minProperties", 0) for part in shape.parts), default=0)
        most = min((part.get("maxProperties", len(blocks)) for part in shape.parts), default=len(blocks))
        num_required = sum(required for _, required in blocks)
        if least <= num_required and most >= len(blocks):
            return " ".join(one if required else f"({one})?" for one, required in blocks) or '""'
        if len(blocks) > MAX_COUNTED_ARGUMENTS:
            raise self._refusal(f"minProperties and maxProperties with more than {MAX_COUNTED_ARGUMENTS} properties")
        return self._counted(blocks, least, most)

    def _counted(self, blocks: list[tuple[str, bool]], least: int, most: int) -> str | None:
        """`least` to `most` of the blocks: a rule for each number of blocks before a place."""
        after: dict[int, str | None] = {n: '""' if least <= n <= most else None for n in range(len(blocks) + 2)}
        for index in range(len(blocks) - 1, -1, -1):
            block, required = blocks[index]
            rules: dict[int, str | None] = {}
            for count in range(index + 1):
                taken, left = after[count + 1], None if required else after[count]
                choices = ([f"{block} {taken}"] if taken is not None else []) + ([left] if left is not None else [])
                rules[count] = self._rules.rule(" | ".join(choices)) if choices else None
            after = rules
        return after[0]

    def _arguments(self, shape: _Shape, name: str) -> Iterator[NamedArgument]:
        """The argument, once for each choice of patterns that its name may match."""
        patterns = sorted({pattern for part in shape.parts for pattern in _patterns(part)})
        if 2 ** len(patterns) > MAX_CHOICES:
            raise self._refusal(f"more than {len(patterns) - 1} patternProperties cannot be enforced")
        for matching in itertools.product((True, False), repeat=len(patterns)):
            matched = {pattern for pattern, is_matched in zip(patterns, matching, strict=True) if is_matched}
            schemas = [one for part in shape.parts for one in _schemas_of(part, name, matched)]
            if any(one is False for one in schemas):
                continue
            asserting = [one for one in schemas if isinstance(one, dict)]
            schema = asserting[0] if len(asserting) == 1 else {"allOf": asserting} if asserting else True
            term = None
            if patterns:
                found = [search(one) if one in matched else without("/(?s:.*)/", search(one)) for one in patterns]
                term = both([quoted(name), *found])
            yield NamedArgument(name, schema, term)

    def _refusal(self, what: str) -> RequestError:
        return RequestError(f"the arguments of {self._tool}: {what}", "tools")


def _names(shape: _Shape) -> dict[str, bool]:
    """The names of arguments in order, and whether each is required."""
    names: dict[str, bool] = {}
    for part in shape.parts:
        names.update(dict.fromkeys(part.get("properties") or (), False) | names)
    for part in shape.parts:
        names.update(dict.fromkeys(listed(part, "required"), True))
    return names


def _patterns(part: dict[str, Any]) -> dict[str, Any]:
    return part.get("patternProperties") or {}


def _schemas_of(part: dict[str, Any], name: str, matched: set[str]) -> list[Any]:
    """Returns the schemas in an object's schema that hold for the argument of this name."""
    properties = part.get("properties") or {}
    found = [schema for pattern, schema in _patterns(part).items() if pattern in matched]
    if name in properties:
        found.append(properties[name])
    return found or [part.get("additionalProperties", True)]


def _is_plain(schema: Any, types: frozenset[str]) -> bool:
    """Whether a schema says nothing of these numbers but their type."""
    if not isinstance(schema, dict) or not schema.keys() <= _ANNOTATIONS | {"type", "anyOf"}:
        return False
    branches = listed(schema, "anyOf")
    return named_types(schema.get("type")) >= types and (not branches or any(_is_plain(one, types) for one in branches))
