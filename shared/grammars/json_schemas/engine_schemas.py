"""The JSON schemas that each engine takes: a table of keywords and values, and the mends that make the rest right.

Each function gets a schema in normal form, changes it, and returns one of which the engine honours every word. It
raises UnsupportedGrammar for anything else: output that a keyword would forbid is worse than an error. No library is
loaded.
"""

import re
from typing import Any

import msgspec

from blockyard.shared.grammars.interface import UnsupportedGrammar
from blockyard.shared.grammars.json_schemas import patterns
from blockyard.shared.grammars.json_schemas.keywords import Schema, keywords, subschemas
from blockyard.shared.grammars.json_schemas.patterns import plain_pattern, whole_pattern
from blockyard.shared.grammars.json_schemas.rules import (
    DATES,
    HOSTS,
    POINTERS,
    TIMES,
    Refusal,
    Table,
    bound_hosts,
    close_objects,
    drop_forbidden,
    fit_bounds,
    keep_values_of_type,
    name_required,
    name_types,
    refuse_combinations,
    refuse_contradictions,
    refuse_fine_bounds,
    refuse_odd_names,
    refuse_others,
    refuse_overlaps,
    refuse_uncounted_properties,
    replace_formats,
)
from blockyard.shared.messages import GrammarEngine

_CONTROL_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*\\u00")  # in JSON that msgspec wrote


def _table(names: str, **values: Refusal) -> Table:
    return {**dict.fromkeys(keywords(names), lambda value: ""), **values}


def _not(refused: object) -> Refusal:
    return lambda value: str(value).lower() if value is refused else ""


def _formats(names: str) -> Refusal:
    known = keywords(names)
    return lambda value: "" if value in known else value[:40]


def _complex(pattern: str) -> str:
    """The part of a pattern that the simple engines misread in a string of JSON."""
    if fault := patterns.misread(pattern):
        return fault
    if patterns.writes_controls(pattern):
        return "control characters"
    return "quotes and backslashes" if patterns.writes_quotes(pattern) else ""


def _other_values(values: list[Any]) -> str:
    if not all(isinstance(value, str) and value.isprintable() for value in values):
        return "values but strings of printable characters"
    return "quotes and backslashes" if any(sign in value for value in values for sign in '"\\') else ""


def _writes_any_character(pattern: str) -> bool:
    return bool(_ANY_CHARACTER.search(pattern)) or patterns.spans_quotes(pattern)


GUIDANCE = _table(
    "type enum const anyOf oneOf allOf $ref items prefixItems minItems maxItems properties required "
    "additionalProperties patternProperties minProperties maxProperties minLength maxLength pattern "
    "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
    format=_formats("duration email hostname ipv4 ipv6 uuid uri"),
)
# https://xgrammar.mlc.ai and its json_schema_converter.cc
XGRAMMAR = _table(
    "type enum const properties required additionalProperties items prefixItems minItems maxItems minLength maxLength "
    "minimum maximum exclusiveMinimum exclusiveMaximum anyOf oneOf $ref minProperties maxProperties",
    pattern=_complex,
    format=_formats("duration email ipv6 uuid uri uri-reference uri-template"),
)
_SETS_OF_OTHERS = re.compile(r"\\[SWD]")
_ANY_CHARACTER = re.compile(r"(?<!\\)\.|\[\^|\\[SWD]")  # quotes among them
OUTLINES = _table(
    "type enum const properties required prefixItems minItems maxItems minLength maxLength anyOf oneOf $ref "
    "additionalProperties",
    items=_not(False),
    pattern=lambda pattern: _complex(pattern) or "any character" * _writes_any_character(pattern),
    format=_formats("uuid"),  # it ignores others, or lets control characters through
)
ENFORCER = _table(
    "type properties required additionalProperties minItems minLength anyOf $ref",
    enum=_other_values,
    const=lambda value: _other_values([value]),
    items=_not(False),
    maxItems=_not(0),
    maxLength=_not(0),
    pattern=lambda pattern: _complex(pattern) or r"\S, \W and \D" * bool(_SETS_OF_OTHERS.search(pattern)),
)
_OF_TYPES = keywords("minLength maxLength pattern items minItems maxItems properties required additionalProperties")
_ANYTHING: tuple[Schema, ...] = (True, {})
_ANY_VALUE: dict[str, Any] = {
    "anyOf": [{"type": name} for name in ("number", "string", "boolean", "null", "array", "object")]
}


def guidance_schema(schema: Schema) -> Schema:
    name = GrammarEngine.GUIDANCE.value
    schema = bound_hosts(replace_formats(schema, DATES | TIMES | POINTERS))
    refuse_others(schema, GUIDANCE, name)
    refuse_uncounted_properties(schema, name)
    fit_bounds(schema, name)
    for part in subschemas(schema):
        if "pattern" in part:
            part["pattern"] = patterns.without_a_control(plain_pattern(part["pattern"]))
        if "patternProperties" in part:
            named: dict[str, Schema] = {}
            for key, one in part["patternProperties"].items():
                plain = patterns.without_a_control(plain_pattern(key))
                same = named.get(plain, True)
                named[plain] = one if same is True else {"allOf": [same, one]}
            part["patternProperties"] = named
    if needs_escapes(schema) and any(_names_some(part) for part in subschemas(schema)):
        raise UnsupportedGrammar(f"{name} supports control characters in values only where no other names are allowed")
    return schema


def needs_escapes(schema: Schema) -> bool:
    """Whether the schema has values or patterns with control characters, which JSON writes as `\\u0001`."""
    for part in subschemas(schema):
        values = msgspec.json.encode([part.get("const"), part.get("enum")])
        if _CONTROL_ESCAPE.search(values) or patterns.needs_escapes(part.get("pattern", "")):
            return True
    return False


def _names_some(part: dict[str, Any]) -> bool:
    """Whether the schema has properties, and allows others, which could spell the same names with escapes."""
    is_open = part.get("additionalProperties", True) is not False or "patternProperties" in part
    return is_open and not part.keys().isdisjoint(("properties", "patternProperties"))


def xgrammar_schema(schema: Schema, additional_properties: bool = True) -> Schema:
    name = GrammarEngine.XGRAMMAR.value
    if not additional_properties:
        schema = close_objects(schema)
    replace_formats(schema, DATES | HOSTS | TIMES | POINTERS)
    refuse_others(schema, XGRAMMAR, name)
    name_required(name_types(keep_values_of_type(schema)))
    refuse_combinations(schema, name)
    refuse_overlaps(schema, name)
    refuse_uncounted_properties(schema, name)
    refuse_fine_bounds(schema, name)
    for part in subschemas(schema):
        if _names_some(part) and not all(map(_is_plain_name, part["properties"])):
            raise UnsupportedGrammar(
                f"{name} supports names with quotes, backslashes and characters beyond printable ASCII only beside "
                "additionalProperties of false"
            )
        if isinstance(pattern := part.get("pattern"), str):
            plain = patterns.without_options(plain_pattern(pattern, within_json=True))
            part["pattern"] = patterns.in_ascii(plain)  # a class with other characters would let quotes in
        elif part.keys() & {"minLength", "maxLength"}:  # by these alone it would let control characters in
            least, most = part.pop("minLength", 0), part.pop("maxLength", "")
            part["pattern"] = f"^.{{{least},{most}}}$"
    return schema


def _is_plain_name(name: str) -> bool:
    return name.isascii() and name.isprintable() and not any(sign in name for sign in '"\\')


def refuse_lark_schema(schema: object) -> str:
    """Raises UnsupportedGrammar: xgrammar ignores keywords of schemas within Lark."""
    raise UnsupportedGrammar(f"{GrammarEngine.XGRAMMAR.value} does not support %json in Lark")


def outlines_schema(schema: Schema) -> Schema:
    name = GrammarEngine.OUTLINES.value
    replace_formats(schema, DATES | HOSTS | TIMES | POINTERS)
    refuse_others(schema, OUTLINES, name)
    drop_forbidden(name_required(name_types(keep_values_of_type(schema))))
    _refuse_for_closed(schema, name)
    refuse_overlaps(schema, name)
    for part in subschemas(schema):
        if "pattern" in part:  # the string's quotes are no part of its first and last alternatives
            part["pattern"] = f"({whole_pattern(plain_pattern(part['pattern'], within_json=True))})"
        if not part.keys() - {"$defs"}:
            raise UnsupportedGrammar(f"{name} supports no schemas without a type, a value or a choice")
        dropped = sorted(part.keys() & {"items", "minItems", "maxItems"})
        if "prefixItems" in part and dropped:
            raise UnsupportedGrammar(f"{name} does not support these keywords beside prefixItems: {', '.join(dropped)}")
    return schema


def enforcer_schema(schema: Schema) -> Schema:
    name = GrammarEngine.LM_FORMAT_ENFORCER.value
    refuse_others(schema, ENFORCER, name)
    drop_forbidden(name_required(name_types(keep_values_of_type(schema))))
    _refuse_for_closed(schema, name)
    for part in list(subschemas(schema)):
        if isinstance(part.get("type"), list) and part.keys() & _OF_TYPES:
            raise UnsupportedGrammar(f"{name} supports no other keywords beside a list of types")
        if "pattern" in part:
            part["pattern"] = f"({whole_pattern(plain_pattern(part['pattern'], within_json=True))})"
        # it counts an escape by its characters, and no blanks before others
        if part.keys() & {"minLength", "maxLength"}:
            least, most = part.pop("minLength", 0), part.pop("maxLength", None)
            more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
            part["pattern"] = f"[^ \\t\\n\\r][^\\t\\n\\r]{more}" if least else f"([^ \\t\\n\\r][^\\t\\n\\r]{more})?"
        if part.get("additionalProperties") in _ANYTHING:
            del part["additionalProperties"]
        for keyword in part.keys() & {"properties", "$defs"}:
            part[keyword] = {key: _any_value(one) for key, one in part[keyword].items()}
        if "anyOf" in part:
            part["anyOf"] = [_any_value(one) for one in part["anyOf"]]
    return _any_value(schema)


def _any_value(schema: Schema) -> Schema:
    """Replaces a schema that allows any value by lm-format-enforcer's spelling of it."""
    if schema is False:
        raise UnsupportedGrammar(f"{GrammarEngine.LM_FORMAT_ENFORCER.value} supports no schema of false")
    return _ANY_VALUE if schema in _ANYTHING else schema


def _refuse_for_closed(schema: Schema, engine: str) -> None:
    refuse_combinations(schema, engine)
    refuse_odd_names(schema, engine)
    refuse_contradictions(schema, engine)
