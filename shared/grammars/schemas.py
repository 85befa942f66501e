"""JSON sources of grammars: schemas, choices and structural tags."""

from collections.abc import Callable
from typing import Any

import msgspec

from blockyard.shared.grammars.interface import GrammarError
from blockyard.shared.grammars.json_schemas.keywords import Schema, kind_of
from blockyard.shared.grammars.json_schemas.normal_form import normal_schema


def read_schema(source: str) -> Schema:
    """The normal form of a JSON schema. Raises GrammarError if it is no schema."""
    return normal_schema(_json(source, "the JSON schema"))


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
        raise GrammarError(f"{what} is a JSON object, not {kind_of(value)}")
    return value


def replace_schemas(tag: object, replace: Callable[[Schema], Schema]) -> None:
    """Replaces each JSON schema in a structural tag by what `replace` makes of its normal form. Raises GrammarError."""
    waiting = [tag]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting.extend(part)
        elif isinstance(part, dict):
            if isinstance(part.get("json_schema"), dict | bool):
                part["json_schema"] = replace(normal_schema(part["json_schema"]))
            waiting.extend(value for keyword, value in part.items() if keyword != "json_schema")


def _json(source: str, what: str) -> object:
    try:
        value: object = msgspec.json.decode(source)
    except msgspec.DecodeError as e:
        raise GrammarError(f"{what} is not valid JSON: {e}") from e
    except (RecursionError, UnicodeEncodeError) as e:
        raise GrammarError(f"{what} cannot be read: {e}") from e
    return value
