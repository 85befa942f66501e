"""Reads config.json and generation_config.json of a Hugging Face model folder."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from blockyard.shared.config import model_bounds
from blockyard.shared.config.text_part import text_part, text_patch
from blockyard.shared.errors import ConfigError
from blockyard.shared.json_objects import merge_patch, read_json

T = TypeVar("T", bound=msgspec.Struct)

# null is no value of these: families have defaults for all of them
NEVER_NULL = ("rope_theta", "rope_parameters", "partial_rotary_factor", "rope_local_base_freq", "hidden_act")
# lists with one entry for each layer
PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "attn_type_list", "moe_layer_freq")


def read_config(folder: Path, overrides: str = "{}", note: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Reads config.json and merges `overrides`, a JSON object, into it (RFC 7396: null removes). Raises ConfigError.

    Of a model with several parts, the settings of its text part. note: is given lines for the start's report.
    """
    path = folder / "config.json"
    config = read_json(path)
    try:
        patch = msgspec.json.decode(overrides or "{}", type=dict[str, Any])
    except msgspec.DecodeError as e:
        raise ConfigError(f"config overrides {overrides!r}: {e}") from e
    config = text_part(config)
    patch = text_patch(patch)
    _settle_rope(config, note)
    _spell_rope(patch)
    if "rope_parameters" in config and patch.keys() & {"rope_scaling", "rope_theta"}:
        patch = _override_rope(config, patch, note)
    for whole in ("rope_scaling", "rope_parameters"):  # replaced, not merged: RoPE types have different keys
        if isinstance(patch.get(whole), dict):
            config.pop(whole, None)
    merged = merge_patch(config, patch)
    if "num_hidden_layers" in patch:
        _cut_layers(merged, patch, note)
    names = merged.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise ConfigError(f"{path} names no architecture: `architectures` is {json.dumps(names)}")
    return merged


def read_eos_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    """Returns the end-of-sequence ids of generation_config.json, or the ids in config.json if it has none."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
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


def with_defaults(
    config: dict[str, Any], defaults: Mapping[str, Any], other_names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Returns config.json with the defaults of its family in transformers, for the fields that it leaves out.

    other_names: of a field, with the name that the family reads. As in transformers, they override that field.
    """
    said = {key: value for key, value in config.items() if value is not None or key not in NEVER_NULL}
    names = {name: said[other] for other, name in (other_names or {}).items() if said.get(other) is not None}
    return {**defaults, **said, **names}


def parse(config: dict[str, Any], fields: type[T]) -> T:
    """Converts config.json to the struct `fields` and checks types. Raises ConfigError.

    Ignores other keys. A flag that is null is false, as in transformers.
    """
    nulls = [one.encode_name for one in msgspec.structs.fields(fields) if one.type is bool]
    config = config | {name: False for name in nulls if name in config and config[name] is None}
    try:
        return msgspec.convert(config, fields)
    except msgspec.ValidationError as e:
        raise ConfigError(f"config.json:{model_bounds.describe_error(config, e)}") from e


def _settle_rope(config: dict[str, Any], note: Callable[[str], None]) -> None:
    """Applies `rope_scaling` to `rope_parameters` beside it, which it overrides, as in transformers.

    Where kinds of layers have their own parameters, it is for layers with full attention.
    """
    scaling, found = config.get("rope_scaling"), config.get("rope_parameters")
    if not isinstance(scaling, dict) or not scaling or not isinstance(found, dict) or not found:
        return
    full = found.get("full_attention")
    if isinstance(full, dict):
        config["rope_parameters"] = found | {"full_attention": full | scaling}
        del config["rope_scaling"]
    else:
        del config["rope_parameters"]
    note("rotation: config.json has rope_scaling and rope_parameters; rope_scaling holds, as in transformers")


def _spell_rope(patch: dict[str, Any]) -> None:
    """Spells overrides of rotations so that all families read them."""
    scaling = patch.get("rope_scaling")
    if isinstance(scaling, dict) and "type" in scaling:
        patch["rope_scaling"] = {"rope_type": scaling["type"]} | {k: v for k, v in scaling.items() if k != "type"}
    if "rope_theta" in patch:
        patch.setdefault("rotary_emb_base", patch["rope_theta"])  # GPT-NeoX's name of it


def _override_rope(config: dict[str, Any], patch: dict[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """Applies overrides of the older `rope_scaling` and `rope_theta` to `rope_parameters`. Returns the other ones.

    Where kinds of layers have their own parameters, it overrides the layers with full attention.
    """
    rest, found = dict(patch), config.pop("rope_parameters")
    if not isinstance(found, dict):
        return rest
    by_kind = any(isinstance(value, dict) for value in found.values())
    full = (found.get("full_attention") or {}) if by_kind else found
    theta, scaling = rest.pop("rope_theta", full.get("rope_theta")), rest.pop("rope_scaling", full)
    scaling = {**(scaling or {})}
    changed = ({"rope_theta": theta} if theta is not None else {}) | {
        k: v for k, v in scaling.items() if k != "rope_theta"
    }
    config["rope_parameters"] = found | {"full_attention": changed} if by_kind else changed
    if by_kind:
        note("rotation: --rope-theta and --rope-scaling apply to the layers with full attention")
    return rest


def _cut_layers(config: dict[str, Any], patch: dict[str, Any], note: Callable[[str], None]) -> None:
    """Cuts the lists with one entry for each layer, where an override lowers the number of layers."""
    count = config.get("num_hidden_layers")
    if not isinstance(count, int) or count < 0:
        return
    cut = [
        key
        for key in PER_LAYER
        if key not in patch and isinstance(found := config.get(key), list) and len(found) > count
    ]
    for key in cut:
        config[key] = config[key][:count]
    if cut:
        note(f"config.json: {', '.join(cut)} {'are' if len(cut) > 1 else 'is'} cut to the first {count} layers")
