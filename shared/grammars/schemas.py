"""JSON sources of grammars: choices, and the keywords of JSON schemas.

Libraries compile schemas. But some of them ignore keywords that they do not know, and output that such a keyword would
forbid is worse than an error. So their engines list the keywords they honour, and others are refused by name here.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from blockyard.shared.grammars.interface import GrammarError, UnsupportedGrammar


def keywords(names: str) -> frozenset[str]:
    """A set of keywords, from their names with spaces between."""
    return frozenset(names.split())


# where a schema holds other schemas
_ONE = keywords("additionalProperties unevaluatedProperties propertyNames unevaluatedItems contains not if then else")
_ONE |= keywords("items additionalItems")
_LIST = keywords("anyOf oneOf allOf prefixItems items")
_NAMED = keywords("properties patternProperties $defs definitions dependentSchemas")
# say nothing about which values are valid
ANNOTATIONS = keywords(
    "$schema $id $anchor $comment title description default examples example deprecated readOnly writeOnly "
    "discriminator contentMediaType contentEncoding nullable strict name x-guidance"
)


# xgrammar ignores the others: https://xgrammar.mlc.ai and its json_schema_converter.cc
XGRAMMAR_KEYWORDS = keywords(
    "type enum const properties required additionalProperties unevaluatedProperties items prefixItems minItems "
    "maxItems unevaluatedItems minLength maxLength pattern format minimum maximum exclusiveMinimum exclusiveMaximum "
    "anyOf oneOf $ref $defs definitions minProperties maxProperties"
)


def read_schema(source: str) -> dict[str, Any] | bool:
    """Reads the source of a JSON schema. Raises GrammarError if it is no schema."""
    schema = _json(source, "the JSON schema")
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a JSON schema is an object or a boolean, not {_kind(schema)}")
    if any(part.get("enum") == [] for part in subschemas(schema)):
        raise GrammarError("an enum of the JSON schema is empty")
    return schema


def read_choices(source: str) -> list[str]:
    """Reads the source of a choice. Raises GrammarError for anything but a list of strings with something in it."""
    choices = _json(source, "the list of choices")
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise GrammarError("choices are a list of strings")
    if not choices:
        raise GrammarError("the list of choices is empty")
    return choices


def read_object(source: str, what: str) -> dict[str, Any]:
    """Reads a JSON object. Raises GrammarError."""
    value = _json(source, what)
    if not isinstance(value, dict):
        raise GrammarError(f"{what} is a JSON object, not {_kind(value)}")
    return value


def schemas_in(structural_tag: dict[str, Any]) -> Iterator[dict[str, Any] | bool]:
    """The JSON schemas in a structural tag."""
    waiting: list[object] = [structural_tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, dict):
            schema = part.get("json_schema")
            if isinstance(schema, dict | bool):
                yield schema
            waiting.extend(value for keyword, value in part.items() if keyword != "json_schema")


def refuse_keywords(schema: dict[str, Any] | bool, supported: frozenset[str], engine: str) -> None:
    """Raises UnsupportedGrammar that names the keywords which the engine would ignore."""
    used = {keyword for part in subschemas(schema) for keyword in part}
    unknown = sorted(used - supported - ANNOTATIONS)
    if unknown:
        raise UnsupportedGrammar(f"{engine} does not support these keywords of JSON schemas: {', '.join(unknown[:20])}")


def refuse_lark_schemas(source: str, engine: str) -> None:
    """Raises UnsupportedGrammar for Lark with JSON schemas inside, of which the engine ignores keywords."""
    if "%json" in source:
        raise UnsupportedGrammar(f"{engine} does not support %json in Lark")


def close_objects(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Objects with `properties` get `additionalProperties: false` where the schema says nothing. Changes `schema`."""
    for part in subschemas(schema):
        if "properties" in part and not part.keys() & {"additionalProperties", "patternProperties"}:
            part["additionalProperties"] = False
    return schema


def subschemas(schema: object) -> Iterator[dict[str, Any]]:
    """The schema and all schemas in it. Values (`const`, `enum`, `default`) are not searched."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for keyword in _ONE:
            waiting.append(part.get(keyword))
        for keyword in _LIST:
            if isinstance(listed := part.get(keyword), list):
                waiting.extend(listed)
        for keyword in _NAMED:
            if isinstance(named := part.get(keyword), dict):
                waiting.extend(named.values())


def _json(source: str, what: str) -> object:
    try:
        value: object = msgspec.json.decode(source)
    except msgspec.DecodeError as e:
        raise GrammarError(f"{what} is not valid JSON: {e}") from e
    except (RecursionError, UnicodeEncodeError) as e:
        raise GrammarError(f"{what} cannot be read: {e}") from e
    return value


def _kind(value: object) -> str:
    return {str: "a string", list: "a list", type(None): "null"}.get(type(value), "a number")
