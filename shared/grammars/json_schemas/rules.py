"""What the engines of JSON schemas leave out without a word: mended where another schema says the same, else refused.

Libraries follow one keyword of a schema object and drop the keywords beside it (`type` beside `enum`, all beside `$ref`
or `anyOf`), take `oneOf` for `anyOf`, and have formats that let wrong values through (30 February, host names of any
length). Each function here concerns the whole schema and may change it.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from blockyard.shared.grammars.format_patterns import FORMAT_PATTERNS
from blockyard.shared.grammars.interface import GrammarError, UnsupportedGrammar
from blockyard.shared.grammars.json_schemas.keywords import IS_TYPE, Schema, has_type, keywords, subschemas

Refusal = Callable[[Any], str]  # what an engine does not support of a keyword's value; "": it takes the value
Table = Mapping[str, Refusal]  # by the keywords that an engine honours

_HEADS = ("$ref", "const", "enum", "anyOf", "oneOf")  # an engine that follows one of these follows nothing else
_CONCERNED = {
    "string": keywords("minLength maxLength pattern format"),
    "number": keywords("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf"),
    "array": keywords("items prefixItems minItems maxItems unevaluatedItems"),
    "object": keywords(
        "properties required additionalProperties patternProperties minProperties maxProperties unevaluatedProperties"
    ),
}
_ESCAPED = re.compile(r'["\\\x00-\x1f]')
_LENGTHS = keywords("minLength maxLength")
MOST_HOST_CHARS = 253
BOUNDS = keywords("minimum maximum exclusiveMinimum exclusiveMaximum")
MOST_WHOLE = 2**53 - 1  # up to which each whole number is one double
LEAST_NUMBER = 1e-9  # in place of numbers above 0

DATES = {name: f"^{FORMAT_PATTERNS[name]}$" for name in ("date", "date-time")}
HOSTS = {name: f"^{FORMAT_PATTERNS[name]}$" for name in ("hostname", "ipv4")}
TIMES = {"time": f"^{FORMAT_PATTERNS['time']}$"}
POINTERS = {name: f"^{FORMAT_PATTERNS[name]}$" for name in ("json-pointer", "relative-json-pointer")}


def refuse_others(schema: Schema, table: Table, engine: str) -> None:
    """Raises UnsupportedGrammar that names the keywords, or the part of a keyword's value, that the table lacks."""
    parts = list(subschemas(schema))
    unknown = sorted({keyword for part in parts for keyword in part} - table.keys() - {"$defs"})
    if unknown:
        raise UnsupportedGrammar(f"{engine} does not support these keywords of JSON schemas: {', '.join(unknown[:20])}")
    for part in parts:
        for keyword, value in part.items():
            if keyword != "$defs" and (refused := table[keyword](value)):
                raise UnsupportedGrammar(f"{engine} does not support {refused} in `{keyword}`")


def close_objects(schema: Schema) -> Schema:
    """Objects with `properties` get `additionalProperties: false` where the schema says nothing. Changes `schema`."""
    for part in subschemas(schema):
        if "properties" in part and not part.keys() & {"additionalProperties", "patternProperties"}:
            part["additionalProperties"] = False
    return schema


def replace_formats(schema: Schema, patterns: dict[str, str]) -> Schema:
    """Formats in `patterns` become these patterns; beside a pattern, they become one more schema in `allOf`."""
    for part in subschemas(schema):
        name = part.get("format")
        if not isinstance(name, str) or name not in patterns:
            continue
        del part["format"]
        if "pattern" in part:
            part["allOf"] = [*_listed(part, "allOf"), {"pattern": patterns[name]}]
        else:
            part["pattern"] = patterns[name]
    return schema


def bound_hosts(schema: Schema) -> Schema:
    """Host names have at most 253 characters, for an engine that honours `maxLength` beside `format`."""
    for part in subschemas(schema):
        if part.get("format") == "hostname" and isinstance(part.get("maxLength", 0), int):
            part["maxLength"] = min(part.get("maxLength", MOST_HOST_CHARS), MOST_HOST_CHARS)
    return schema


def keep_values_of_type(schema: Schema) -> Schema:
    """Values of `enum` that `type` forbids are left out, and so is `type`. Raises GrammarError if none is left."""
    for part in subschemas(schema):
        if "type" not in part or not part.keys() & {"enum", "const"}:
            continue
        types = part["type"] if isinstance(part["type"], list) else [part["type"]]
        name = "enum" if "enum" in part else "const"
        values = part["enum"] if name == "enum" and isinstance(part["enum"], list) else [part.get(name)]
        kept = [value for value in values if any(has_type(value, one) for one in types)]
        if not kept:
            raise GrammarError(f"no value of {name} in the JSON schema has its type {', '.join(map(str, types))}")
        if name == "enum":
            part["enum"] = kept
        del part["type"]
    return schema


def refuse_combinations(schema: Schema, engine: str) -> None:
    """Raises UnsupportedGrammar that names keywords which the engine drops beside another one."""
    for part in subschemas(schema):
        asserting = part.keys() - {"$defs"}
        head = next((name for name in _HEADS if name in part), None)
        if head is not None and len(asserting) > 1:
            others = ", ".join(sorted(asserting - {head}))
            raise UnsupportedGrammar(f"{engine} does not support these keywords beside {head}: {others}")
        text = [name for name in ("pattern", "format") if name in part]
        dropped = sorted(part.keys() & _LENGTHS) + text[1:]
        if text and dropped:
            raise UnsupportedGrammar(f"{engine} does not support these keywords beside {text[0]}: {', '.join(dropped)}")


def name_types(schema: Schema) -> Schema:
    """Schemas whose keywords concern one type allow this type alone, for engines that follow nothing but `type`."""
    for part in subschemas(schema):
        if not part.keys() & {"type", *_HEADS, "allOf"}:
            types = [name for name, concerned in _CONCERNED.items() if part.keys() & concerned]
            if types:
                part["type"] = types[0] if len(types) == 1 else types
    return schema


def name_required(schema: Schema) -> Schema:
    """Required properties without a schema get that of `additionalProperties`. Raises GrammarError if it is false."""
    for part in subschemas(schema):
        properties, others = part.get("properties", {}), part.get("additionalProperties", True)
        missing = [name for name in _listed(part, "required") if isinstance(name, str) and name not in properties]
        if missing and others is False:
            raise GrammarError(f"the JSON schema requires properties that it forbids: {', '.join(missing[:20])}")
        if missing:
            part["properties"] = {**properties, **{name: {} if others is True else others for name in missing}}
    return schema


def drop_forbidden(schema: Schema) -> Schema:
    """Names that a schema forbids are left out, for engines that allow the names of `properties` alone."""
    for part in subschemas(schema):
        if part.get("additionalProperties") is False:
            del part["additionalProperties"]
            part.setdefault("properties", {})
        properties = part.get("properties", {})
        forbidden = {name for name, one in properties.items() if one is False}
        if forbidden.intersection(part.get("required", [])):
            raise GrammarError(
                f"the JSON schema requires properties that it forbids: {', '.join(sorted(forbidden)[:20])}"
            )
        if forbidden:
            part["properties"] = {name: one for name, one in properties.items() if name not in forbidden}
    return schema


def refuse_contradictions(schema: Schema, engine: str) -> None:
    """Raises UnsupportedGrammar for a least count that is above the most, for engines that do not see it."""
    for part in subschemas(schema):
        for what in ("Items", "Length"):
            if part.get(f"min{what}", 0) > part.get(f"max{what}", math.inf):
                raise UnsupportedGrammar(f"{engine} supports no min{what} above max{what}")


def refuse_odd_names(schema: Schema, engine: str) -> None:
    """Raises UnsupportedGrammar for names of properties that a string of JSON has to escape."""
    for part in subschemas(schema):
        names = part.get("properties", {})
        if isinstance(names, dict) and any(_ESCAPED.search(name) for name in names):
            raise UnsupportedGrammar(f"{engine} does not support quotes, backslashes and control characters in names")


def refuse_uncounted_properties(schema: Schema, engine: str) -> None:
    """Raises UnsupportedGrammar for `minProperties` that a name written twice would satisfy: no engine sees that."""
    for part in subschemas(schema):
        least, names = part.get("minProperties"), _listed(part, "required")
        is_open = part.get("additionalProperties", True) is not False or "patternProperties" in part
        if is_open and isinstance(least, int | float) and least > len(names) + 1:
            raise UnsupportedGrammar(f"{engine} supports minProperties up to one more than `required` lists")


def fit_bounds(schema: Schema, engine: str) -> Schema:
    """Bounds that llguidance misreads become narrower ones. Changes `schema`.

    It lets 0 through beside an exclusive bound of 0, and rounds whole numbers that are no double. Raises
    UnsupportedGrammar where no number is left.
    """
    for part in subschemas(schema):
        for name, other, sign in (("aximum", "inimum", 1), ("inimum", "aximum", -1)):
            if any(sign * part.get(key, 0) > MOST_WHOLE for key in (f"m{other}", f"exclusiveM{other}")):
                raise UnsupportedGrammar(f"{engine} supports no numbers that are all beyond {sign * MOST_WHOLE}")
            for key in (f"m{name}", f"exclusiveM{name}"):
                if sign * part.get(key, 0) > MOST_WHOLE:
                    part[key] = sign * MOST_WHOLE
            if part.get(f"exclusiveM{name}") == 0:
                del part[f"exclusiveM{name}"]
                part[f"m{name}"] = sign * min(sign * part.get(f"m{name}", 0), -LEAST_NUMBER)
    return schema


def refuse_fine_bounds(schema: Schema, engine: str) -> None:
    """Raises UnsupportedGrammar for bounds with more decimals than the engine reads."""
    for part in subschemas(schema):
        for name in part.keys() & BOUNDS:
            if round(part[name], 6) != part[name]:
                raise UnsupportedGrammar(f"{engine} supports at most 6 decimals in `{name}`")


def refuse_overlaps(schema: Schema, engine: str) -> None:
    """Raises UnsupportedGrammar for a `oneOf` of which two schemas may allow the same value."""
    for part in subschemas(schema):
        ones = _listed(part, "oneOf")
        for index, one in enumerate(ones):
            if any(not _exclude_each_other(_resolved(one, schema), _resolved(two, schema)) for two in ones[:index]):
                raise UnsupportedGrammar(
                    f"{engine} supports oneOf only if its schemas differ by type, by value or by a required property"
                )


def _exclude_each_other(one: object, two: object) -> bool:
    """True only if no value is valid under both schemas."""
    if not isinstance(one, dict) or not isinstance(two, dict):
        return one is False or two is False
    values_of_one, values_of_two = _values(one), _values(two)
    if values_of_one is not None and values_of_two is not None:
        return not any(a == b for a in values_of_one for b in values_of_two)
    types_of_one, types_of_two = _types(one, values_of_one), _types(two, values_of_two)
    if types_of_one and types_of_two and not types_of_one & types_of_two:
        return True
    if types_of_one != {"object"} or types_of_two != {"object"}:
        return False
    shared = set(_listed(one, "required")) & set(_listed(two, "required"))
    return any(_exclude_each_other(_property(one, name), _property(two, name)) for name in shared)


def _values(schema: dict[str, Any]) -> list[object] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _types(schema: dict[str, Any], values: list[object] | None) -> set[str]:
    """The types that the schema allows, integers as numbers; empty: any."""
    if values is not None:
        return {name for name in IS_TYPE for value in values if name != "integer" and has_type(value, name)}
    given = schema.get("type", [])
    return {"number" if name == "integer" else name for name in (given if isinstance(given, list) else [given])}


def _property(schema: dict[str, Any], name: str) -> object:
    properties = schema.get("properties", {})
    return properties.get(name, True) if isinstance(properties, dict) else True


def _resolved(part: object, schema: Schema) -> object:
    """The schema that a reference into `$defs` names."""
    if not isinstance(part, dict) or not isinstance(reference := part.get("$ref"), str) or isinstance(schema, bool):
        return part
    _, _, path = reference.partition("#/")
    found: object = schema
    for name in path.split("/"):
        found = found.get(name, True) if isinstance(found, dict) else True
    return found


def _listed(part: dict[str, Any], name: str) -> list[Any]:
    value = part.get(name, [])
    return value if isinstance(value, list) else []
