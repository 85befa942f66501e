"""Reads the parameters of rotary position embeddings (RoPE) from config.json, of all types and spellings."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
DEFAULT_THETA = 10000.0
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"  # in `layer_types`

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class RopeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The RoPE parameters of config.json. Fields that a RoPE type does not use keep their defaults."""

    rope_type: str = "default"
    rope_theta: bounds.Base = DEFAULT_THETA
    factor: bounds.Scale | None = None
    original_max_position_embeddings: bounds.Positions | None = None
    low_freq_factor: bounds.Scale | None = None
    high_freq_factor: bounds.Scale | None = None
    attention_factor: bounds.Scale | None = None
    beta_fast: bounds.Scale | None = None
    beta_slow: bounds.Scale | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: Share = 1.0
    short_factor: list[bounds.Scale] | None = None
    long_factor: list[bounds.Scale] | None = None
    llama_4_scaling_beta: float | None = None  # queries grow with the logarithm of their position

    def rotary_dim(self, head_dim: int) -> int:
        """Returns how many numbers of a head are rotated, the first ones. Raises ConfigError for an odd number."""
        if self.rope_type == "proportional":  # the others are turned by 0, in pairs over the whole head
            return head_dim
        rotated = int(head_dim * self.partial_rotary_factor)
        if rotated < 2 or rotated % 2:
            raise ConfigError(
                f"config.json: partial_rotary_factor {self.partial_rotary_factor:g} rotates {rotated} numbers of heads "
                f"of {head_dim}; an even number is needed"
            )
        return rotated


def read_rope(
    config: Mapping[str, Any], max_positions: int, *, layer_type: str | None = None, rotates_part: bool = False
) -> RopeParameters:
    """Reads `rope_parameters`, or `rope_scaling` (with "type" or "rope_type") and `rope_theta`. Raises ConfigError.

    layer_type: of families whose kinds of layers have their own parameters. rotates_part: whether the family rotates a
    part of each head; the others ignore `partial_rotary_factor`, as in transformers.
    """
    found = _parameters(config, layer_type)
    fields: dict[str, Any] = {"rope_theta": config.get("rope_theta") or DEFAULT_THETA}
    fields |= {"partial_rotary_factor": config.get("partial_rotary_factor") or 1.0}
    fields |= {key: value for key, value in found.items() if value is not None or key == "truncate"}
    fields["rope_type"] = fields.get("rope_type") or fields.get("type") or "default"
    if not rotates_part and fields["rope_type"] != "proportional":
        del fields["partial_rotary_factor"]
    ratio = config.get("rope_condense_ratio")
    if ratio is not None and fields["rope_type"] == "default":  # LongChat's name of linear scaling
        fields |= {"rope_type": "linear", "factor": ratio}
    if fields["rope_type"] == "su":
        fields["rope_type"] = "longrope"
    if fields["rope_type"] == "yarn" and "factor" not in found:  # null: that of the lengths
        raise ConfigError("config.json: rope type 'yarn' needs `factor`")
    if fields["rope_type"] in ("yarn", "llama3", "longrope"):
        trained = config.get("original_max_position_embeddings")
        if trained is not None and layer_type is None:  # overrides that of the parameters, as in transformers
            fields["original_max_position_embeddings"] = trained
        fields.setdefault("original_max_position_embeddings", max_positions)
    rope = parse(fields, RopeParameters)
    _check(rope)
    return rope


def _parameters(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    """Returns the parameters of a kind of layer. `rope_scaling` overrides others and is for full attention alone."""
    scaling = config.get("rope_scaling")
    found = scaling or config.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise ConfigError(f"config.json: rope parameters must be an object, got {found!r}")
    is_by_kind = any(isinstance(value, dict) for value in found.values())
    if layer_type is None:
        if is_by_kind:
            raise ConfigError("config.json: rope_parameters has objects of kinds of layers, which this family lacks")
        return found
    if is_by_kind:
        return found.get(layer_type) or {}
    if found and not scaling:
        raise ConfigError("config.json: rope_parameters needs an object for each kind of layer")
    if found and "rope_type" not in found:  # transformers ignores the older name here
        raise ConfigError("config.json: rope_scaling needs `rope_type`")
    return found if layer_type == FULL else {}


def _check(rope: RopeParameters) -> None:
    if rope.rope_type not in KINDS:
        raise ConfigError(f"config.json: rope type {rope.rope_type!r} is not supported; {', '.join(KINDS)} are")
    if rope.rope_type in ("linear", "dynamic", "llama3") and rope.factor is None:
        raise ConfigError(f"config.json: rope type {rope.rope_type!r} needs `factor`")
    if rope.rope_type == "llama3" and (rope.low_freq_factor is None or rope.high_freq_factor is None):
        raise ConfigError("config.json: rope type 'llama3' needs `low_freq_factor` and `high_freq_factor`")
    if rope.rope_type == "longrope" and (rope.short_factor is None or rope.long_factor is None):
        raise ConfigError("config.json: rope type 'longrope' needs `short_factor` and `long_factor`")
    if rope.llama_4_scaling_beta is not None and rope.original_max_position_embeddings is None:
        raise ConfigError("config.json: llama_4_scaling_beta needs `original_max_position_embeddings`")
