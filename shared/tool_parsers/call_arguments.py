"""The arguments of an earlier call as chat templates take them: models write other values, and cut texts."""

from typing import Any

import msgspec


def template_arguments(given: object) -> dict[str, Any] | str:
    """The object, where there is one, and else the text: never an error, because a client can only send it again.

    Nothing and null are an empty object. A JSON string is decoded once, since models and clients encode twice.
    """
    if given is None or isinstance(given, dict):
        return given or {}
    text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    value = _decoded(text)
    if isinstance(value, str):
        text, value = value, _decoded(value)
    if value is None or not text.strip():
        return {}
    return value if isinstance(value, dict) else text


def _decoded(text: str) -> object:
    """The JSON value; False for text that is no JSON."""
    try:
        value: object = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return value
