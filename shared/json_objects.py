"""Decodes the JSON files of model folders, which Python's `json` and transformers write, and merges objects."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from blockyard.shared.errors import ConfigError

_TAG = "__float__"  # transformers writes a number that JSON lacks as {"__float__": "Infinity"}
_TAGGED = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def decode_object(data: bytes) -> dict[str, Any]:
    """Decodes a JSON object, which may have Infinity and NaN. Raises ValueError."""
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as e:
        found = _decode_as_python(data, e)
    return _replace_tags(found) if _TAG.encode() in data else found


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object from a file. Raises ConfigError naming it."""
    try:
        return decode_object(path.read_bytes())
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"{path} is not a JSON object: {e}") from e


def merge_patch(base: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """Merges by RFC 7396: objects key by key, and None removes a key."""
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = merge_patch(merged[key], value)
        else:
            merged[key] = value
    return merged


def _decode_as_python(data: bytes, error: Exception) -> dict[str, Any]:
    """Decodes what Python's `json` reads besides JSON. error: that of a strict decoder."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(str(error)) from error
    return found


def _replace_tags(value: Any) -> Any:
    if isinstance(value, list):
        return [_replace_tags(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TAG} and isinstance(value[_TAG], str):
        return _TAGGED.get(value[_TAG], value)
    return {key: _replace_tags(one) for key, one in value.items()}
