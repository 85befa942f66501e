"""The JSON types that a schema allows, as far as its keywords say it."""

import math
from collections.abc import Iterator
from typing import Any

NESTED = frozenset({"array", "object"})
NUMBERS = frozenset({"integer", "number"})
NOT_STRINGS = NESTED | NUMBERS | {"boolean", "null"}
ALL_TYPES = NOT_STRINGS | {"string"}
MAX_SCHEMAS = 200  # looked at for the types of one argument
ANY = "any"
# names that tools' schemas use for the types of JSON: Python's and C's -> a type
OTHER_NAMES = {
    "str": "string",
    **dict.fromkeys(("int", "uint", "long", "ulong", "short", "ushort"), "integer"),
    **dict.fromkeys(("float", "double", "decimal", "num"), "number"),
    "bool": "boolean",
    **dict.fromkeys(("list", "arr", "tuple", "set"), "array"),
    **dict.fromkeys(("dict", "map", "mapping"), "object"),
    **dict.fromkeys(("none", "nonetype"), "null"),
    ANY: ANY,
}


def parameter_types(schema: dict[str, Any], name: str) -> frozenset[str]:
    """The JSON types that the schema of a tool's arguments allows for this one; all where it says nothing of it."""
    return _Types(schema).of_parameter(name)


def resolve(root: dict[str, Any], reference: object) -> Any:
    """The schema in `root` that a `$ref` leads to, such as `#/$defs/city`. None if it leads elsewhere."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def types_of(schema: Any, root: dict[str, Any]) -> frozenset[str]:
    """The JSON types that a schema inside of `root` allows."""
    return _Types(root).of(schema)


def type_of(value: object) -> str:
    """The JSON type of a decoded value; the narrower one of a whole number."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if math.isfinite(value) and value == int(value) else "number"
    if value is None:
        return "null"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


class _Types:
    """Reads types out of one tool's schema. A schema with many others in it is looked at in part."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._left = MAX_SCHEMAS

    def of_parameter(self, name: str) -> frozenset[str]:
        found = list(self._declared(self._root, name))
        if not found:
            others = self._root.get("additionalProperties")
            return self.of(others) if isinstance(others, dict) else ALL_TYPES
        return frozenset().union(*map(self.of, found))

    def _declared(self, schema: Any, name: str) -> Iterator[Any]:
        """The schemas of this argument, also in parts of a schema that is put together."""
        self._left -= 1
        if self._left < 0 or not isinstance(schema, dict):
            return
        properties = schema.get("properties")
        if isinstance(properties, dict) and name in properties:
            yield properties[name]
        if "$ref" in schema:
            yield from self._declared(resolve(self._root, schema["$ref"]), name)
        for keyword in ("allOf", "anyOf", "oneOf"):
            for part in listed(schema, keyword):
                yield from self._declared(part, name)

    def of(self, schema: Any) -> frozenset[str]:
        self._left -= 1
        if self._left < 0 or not isinstance(schema, dict):
            return ALL_TYPES
        types = named_types(schema.get("type"))
        if isinstance(schema.get("enum"), list):
            types &= frozenset(map(type_of, schema["enum"]))
        if "const" in schema:
            types &= {type_of(schema["const"])}
        if "$ref" in schema:
            types &= self.of(resolve(self._root, schema["$ref"]))
        for part in listed(schema, "allOf"):
            types &= self.of(part)
        for keyword in ("anyOf", "oneOf"):
            parts = listed(schema, keyword)
            if parts:
                types &= frozenset().union(*map(self.of, parts))
        return types


def named_types(kind: object) -> frozenset[str]:
    names = frozenset(json_type(name) for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str))
    if not names or ANY in names:
        return ALL_TYPES
    return names | {"integer"} if "number" in names else names


def json_type(name: str) -> str:
    """The JSON type of this name, such as `list[int]` or `INT64`; `ANY` for each. The name itself if none is known."""
    plain = name.strip().lower().partition("[")[0]
    return plain if plain in ALL_TYPES else OTHER_NAMES.get(plain.rstrip("0123456789"), name)


def listed(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
