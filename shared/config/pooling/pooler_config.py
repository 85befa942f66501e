"""Reads --override-pooler-config, which has vLLM's names."""

from collections.abc import Mapping

import msgspec

from blockyard.shared.config.pooling.modes import PoolingMode, read_vllm_name
from blockyard.shared.errors import ConfigError

FLAG = "--override-pooler-config"


class PoolerOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """What the flag says. None: nothing of this."""

    mode: PoolingMode | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    step_tag_id: int | None = None  # the token that ends a step
    returned_token_ids: tuple[int, ...] | None = None  # the logits of a step that are returned


class _Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pooling_type: str | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None


def read_overrides(values: Mapping[str, object]) -> PoolerOverrides:
    """Reads the JSON object of the flag. Raises ConfigError for unknown keys and wrong values."""
    if unknown := [key for key in values if key not in _Fields.__struct_fields__]:
        raise ConfigError(f"{FLAG}: {unknown[0]!r} is not one of {', '.join(_Fields.__struct_fields__)}")
    try:
        fields = msgspec.convert(dict(values), _Fields)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{FLAG}: {e}") from e
    mode = None if fields.pooling_type is None else read_vllm_name(fields.pooling_type, f"{FLAG}: pooling_type")
    for name, ids in (("step_tag_id", [fields.step_tag_id]), ("returned_token_ids", fields.returned_token_ids or [])):
        if wrong := [one for one in ids if one is not None and one < 0]:
            raise ConfigError(f"{FLAG}: {name} {wrong[0]} is not a token id")
    return PoolerOverrides(
        mode=mode,
        normalize=fields.normalize,
        softmax=fields.softmax,
        step_tag_id=fields.step_tag_id,
        returned_token_ids=None if fields.returned_token_ids is None else tuple(fields.returned_token_ids),
    )
