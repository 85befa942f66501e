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
    config: Mapping[str, Any],
    max_positions: int,
    default_theta: float = DEFAULT_THETA,
    *,
    layer_type: str = FULL,
    default_share: float = 1.0,
) -> RopeParameters:
    """Reads `rope_parameters`, or `rope_scaling` (with "type" or "rope_type") and `rope_theta`. Raises ConfigError.

    layer_type: the kind of layer, if `rope_parameters` has an object for each kind. default_share: of a head that
    is rotated, if config.json does not say it.
    """
    found = _parameters(config, layer_type)
    share = config.get("partial_rotary_factor") or config.get("rotary_pct") or default_share
    fields = {"rope_theta": config.get("rope_theta") or default_theta, "partial_rotary_factor": share}
    fields |= {key: value for key, value in found.items() if value is not None}
    fields["rope_type"] = fields.get("rope_type") or fields.get("type") or "default"
    ratio = config.get("rope_condense_ratio")
    if ratio is not None and fields["rope_type"] == "default":  # LongChat's name of linear scaling
        fields |= {"rope_type": "linear", "factor": ratio}
    if fields["rope_type"] == "su":
        fields["rope_type"] = "longrope"
    trained = config.get("original_max_position_embeddings")
    if fields["rope_type"] == "longrope" and trained is not None:
        fields["original_max_position_embeddings"] = trained
    if fields["rope_type"] in ("yarn", "llama3", "longrope"):
        fields.setdefault("original_max_position_embeddings", trained or max_positions)
    rope = parse(fields, RopeParameters)
    _check(rope)
    return rope


def read_sliding_rope(config: Mapping[str, Any], max_positions: int, theta: float) -> RopeParameters:
    """Reads the parameters of layers with a sliding window, where the parameters in config.json are for full attention.

    theta: of these layers, if `rope_parameters` has none for each kind of layer. Raises ConfigError.
    """
    found = config.get("rope_parameters")
    if isinstance(found, dict) and is_by_layer_type(found):
        return read_rope({"rope_parameters": found}, max_positions, theta, layer_type=SLIDING)
    return parse({"rope_theta": theta}, RopeParameters)


def _parameters(config: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(found, dict) and is_by_layer_type(found):
        found = found.get(layer_type) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"config.json: rope parameters must be an object, got {found!r}")
    return found


def is_by_layer_type(parameters: Mapping[str, Any]) -> bool:
    """Whether `rope_parameters` has an object for each kind of layer."""
    return any(isinstance(value, dict) for value in parameters.values())


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
