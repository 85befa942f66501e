"""Writes the grammar of calls in Python: keyword arguments, or `**` and an object where the schema is not plain."""

from collections.abc import Sequence
from typing import Any

import msgspec

from blockyard.shared.tool_parsers.grammar_rules import MAX_CALLS, GrammarRules, any_of, arguments_schema
from blockyard.shared.tool_parsers.tools import Tool

_PLAIN = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions"})
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$schema"})
_DEFINITIONS = ("$defs", "definitions")


def calls_rule(rules: GrammarRules, tools: Sequence[Tool], parallel: bool, separator: str, before: str = "") -> str:
    """The expression of one call, or several. `before` is one text with the name of the first."""
    arguments = [_arguments(rules, tool) for tool in tools]
    heads = [rules.text(f"{before}{tool.name}(") for tool in tools]
    first = any_of([f"{head} {rule}" for head, rule in zip(heads, arguments, strict=True)])
    if not parallel:
        return first
    calls = [f"{rules.text(f'{tool.name}(')} {rule}" for tool, rule in zip(tools, arguments, strict=True)]
    return f"{first} ({rules.text(separator)} {rules.rule(any_of(calls))}){{0,{MAX_CALLS - 1}}}"


def _arguments(rules: GrammarRules, tool: Tool) -> str:
    """The rule of what stands behind the opening bracket.

    Arguments stand in the order of the schema; optional ones may be left out.
    """
    schema = arguments_schema(tool)
    if not _is_plain(schema):
        return rules.rule(f'"**" {rules.json(schema)} ")"')
    properties = {name: one for name, one in (schema.get("properties") or {}).items() if one is not False}
    required = set(schema.get("required") or ())
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    behind = first = '""'  # the arguments from one on: behind another, and without one before
    for name in reversed(properties):
        value = rules.rule(f"{rules.text(name + '=')} {_value(rules, properties[name], definitions)}")
        following = rules.text(", ")
        if name in required:
            first, behind = f"{value} {behind}", rules.rule(f"{following} {value} {behind}")
        else:
            first = rules.rule(f"{value} {behind} | {first}")
            behind = rules.rule(f"({following} {value})? {behind}")
    return rules.rule(f'{rules.rule(first)} ")"')


def _value(rules: GrammarRules, schema: Any, definitions: dict[str, Any]) -> str:
    if isinstance(schema, dict) and schema.get("type") == "boolean" and schema.keys() <= _ANNOTATIONS | {"type"}:
        return '("True" | "False")'
    if isinstance(schema, dict) and b'"$ref"' in msgspec.json.encode(schema):
        schema = {**schema, **definitions}
    return rules.json({} if schema is True else schema)


def _is_plain(schema: dict[str, Any]) -> bool:
    """Whether each argument can be written by itself."""
    properties = schema.get("properties") or {}
    if not schema.keys() <= _PLAIN | _ANNOTATIONS or schema.get("type") != "object":
        return False
    if not all(name.isidentifier() for name in properties):
        return False
    if not all(name in properties and properties[name] is not False for name in schema.get("required") or ()):
        return False
    source = msgspec.json.encode(schema)
    return source.count(b'"$ref":"') == sum(source.count(f'"$ref":"#/{key}/'.encode()) for key in _DEFINITIONS)
