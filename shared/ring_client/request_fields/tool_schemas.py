"""The JSON schemas of tools: checks their form, names their types, and moves them into other schemas.

Chat templates take any object, and a model would then be shown a tool that it cannot call.
"""

from collections.abc import Callable, Iterator
from typing import Any

from blockyard.shared.errors import RequestError
from blockyard.shared.tool_parsers.schema_types import ALL_TYPES, ANY, json_type

MAX_DEPTH = 64  # of schemas in schemas

# keywords -> what they hold: one schema, a list of them, or schemas by name
_ONE = frozenset(
    {"items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems", "not", "contains"}
    | {"propertyNames", "if", "then", "else"}
)
_LISTED = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})


def check_parameters(schema: object, field: str) -> None:
    """The schema of a tool's arguments, which are a JSON object. Raises RequestError that names the wrong part."""
    if not isinstance(schema, dict):
        raise RequestError(f"a JSON schema is an object, got {type(schema).__name__}", field)
    kind = schema.get("type", "object")
    if _json_types(kind) not in ("object", ["object"]):
        raise RequestError(f"the arguments of a tool are an object, got a schema of type {str(kind)[:40]}", field)
    _check(schema, field, 0)


def with_json_types(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy of a checked schema with the names of JSON schemas for types: many tools use Python's."""

    def renamed(copy: dict[str, Any]) -> None:
        if "type" in copy:
            copy["type"] = _json_types(copy["type"])
            if copy["type"] == ANY or (isinstance(copy["type"], list) and ANY in copy["type"]):
                del copy["type"]

    copy: dict[str, Any] = _rebuilt(schema, renamed)
    return copy


def _json_types(kind: object) -> Any:
    """The `type` of a schema in the names of JSON schemas. Other values than texts stay as they are."""
    if isinstance(kind, list):
        return [_json_types(one) for one in kind]
    return json_type(kind) if isinstance(kind, str) else kind


def moved(schema: Any, place: str) -> Any:
    """A copy of a checked schema for this place in another one, such as `#/$defs/tool0`: its references lead there."""

    def lead(copy: dict[str, Any]) -> None:
        reference = copy.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            copy["$ref"] = place + reference[1:]

    return _rebuilt(schema, lead)


def _rebuilt(schema: Any, change: Callable[[dict[str, Any]], None]) -> Any:
    """A copy of a schema after `change` of it and of each schema in it.

    Values such as `const`, `enum` and `default` may look like schemas, and stay as they are.
    """
    if not isinstance(schema, dict):
        return schema
    copy = dict(schema)
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            copy[keyword] = {name: _rebuilt(part, change) for name, part in value.items()}
        elif keyword in _LISTED | _ONE:
            parts = isinstance(value, list)
            copy[keyword] = [_rebuilt(part, change) for part in value] if parts else _rebuilt(value, change)
    change(copy)
    return copy


def _check(schema: object, field: str, depth: int) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise RequestError(f"a JSON schema is an object or a boolean, got {type(schema).__name__}", field)
    if depth > MAX_DEPTH:
        raise RequestError(f"more than {MAX_DEPTH} schemas in one another", field)
    _check_values(schema, field)
    for keyword, value in schema.items():
        if value is not None:  # clients send every field of their own types
            for part, at in _parts(keyword, value, f"{field}.{keyword[:64]}"):
                _check(part, at, depth + 1)


def _parts(keyword: str, value: object, at: str) -> Iterator[tuple[object, str]]:
    """The schemas that a keyword holds, and where they are."""
    if keyword in _NAMED:
        if not isinstance(value, dict):
            raise RequestError(f"{keyword} is an object of schemas, got {type(value).__name__}", at)
        for name, part in value.items():
            yield part, f"{at}.{name[:64]}"
    elif keyword in _LISTED or (keyword == "items" and isinstance(value, list)):
        if not isinstance(value, list):
            raise RequestError(f"{keyword} is a list of schemas, got {type(value).__name__}", at)
        for i, part in enumerate(value):
            yield part, f"{at}[{i}]"
    elif keyword in _ONE:
        yield value, at


def _check_values(schema: dict[str, Any], field: str) -> None:
    kinds = schema.get("type")
    if kinds is not None:
        listed = kinds if isinstance(kinds, list) else [kinds]
        wrong = [kind for kind in listed if not isinstance(kind, str) or json_type(kind) not in (*ALL_TYPES, ANY)]
        if wrong or not listed:
            raise RequestError(f"{str(wrong or kinds)[:60]} is no type of JSON schemas", f"{field}.type")
    required = schema.get("required")
    if required is not None and not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise RequestError("required is a list of names", f"{field}.required")
    if not isinstance(schema.get("enum", []), list | None):
        raise RequestError("enum is a list of values", f"{field}.enum")
