"""Reads config.json and generation_config.json of a Hugging Face model folder."""

import json
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from blockyard.shared.config import model_bounds
from blockyard.shared.errors import ConfigError

T = TypeVar("T")


def read_config(folder: Path, overrides: str = "{}") -> dict[str, Any]:
    """Reads config.json and merges `overrides`, a JSON object, into it (RFC 7396: null removes). Raises ConfigError."""
    path = folder / "config.json"
    config = _read_object(path)
    try:
        patch = msgspec.json.decode(overrides or "{}", type=dict[str, Any])
    except msgspec.DecodeError as e:
        raise ConfigError(f"config overrides {overrides!r}: {e}") from e
    if "rope_parameters" in config and patch.keys() & {"rope_scaling", "rope_theta"}:
        _split_rope(config)
    for whole in ("rope_scaling", "rope_parameters"):  # replaced, not merged: RoPE types have different keys
        if isinstance(patch.get(whole), dict):
            config.pop(whole, None)
    merged = _merge(config, patch)
    names = merged.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{path} names no architecture: `architectures` is {json.dumps(names)}")
    return merged


def read_eos_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    """Returns the end-of-sequence ids of generation_config.json, or the ids in config.json if it has none."""
    path = folder / "generation_config.json"
    generation = _read_object(path) if path.is_file() else {}
    ids = generation.get("eos_token_id")
    if ids is None:
        ids = config.get("eos_token_id")
    try:
        found = msgspec.convert(ids, int | list[int] | None)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{folder}: eos_token_id {ids!r}: {e}") from e
    if found is None:
        return []
    return [found] if isinstance(found, int) else found


def parse(config: dict[str, Any], fields: type[T]) -> T:
    """Converts config.json to the struct `fields` and checks types. Ignores other keys. Raises ConfigError."""
    try:
        return msgspec.convert(config, fields)
    except msgspec.ValidationError as e:
        raise ConfigError(f"config.json:{model_bounds.describe_error(config, e)}") from e


def _read_object(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ConfigError(f"{path}: {e}") from e


def _split_rope(config: dict[str, Any]) -> None:
    """Renames `rope_parameters` to the older `rope_scaling` and `rope_theta`, so that overrides of these replace it."""
    scaling = config.pop("rope_parameters")
    if isinstance(scaling, dict):
        if "rope_theta" in scaling:
            config["rope_theta"] = scaling["rope_theta"]
        config["rope_scaling"] = {k: v for k, v in scaling.items() if k != "rope_theta"}


def _merge(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            merged[key] = _merge(merged[key], value)
        else:
            merged[key] = value
    return merged
