"""Rotary position embeddings of all RoPE types: reads config.json and computes complex rotations for each position."""

import math
from typing import Any

import msgspec
import torch
from torch import Tensor

from blockyard.services.gpu_worker.loading.hf_config import parse
from blockyard.shared.config import model_bounds as bounds
from blockyard.shared.errors import ConfigError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_THETA = 10000.0


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
    partial_rotary_factor: float = 1.0


def read_rope(config: dict[str, Any], max_positions: int, default_theta: float = DEFAULT_THETA) -> RopeParameters:
    """Reads `rope_parameters`, or `rope_scaling` (with "type" or "rope_type") and `rope_theta`. Raises ConfigError."""
    theta = config.get("rope_theta") or default_theta
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise ConfigError(f"config.json: rope parameters must be an object, got {found!r}")
    fields = {"rope_theta": theta} | {k: v for k, v in found.items() if v is not None}
    fields["rope_type"] = fields.get("rope_type") or fields.get("type") or "default"
    if fields["rope_type"] in ("yarn", "llama3"):
        fields.setdefault(
            "original_max_position_embeddings", config.get("original_max_position_embeddings") or max_positions
        )
    rope = parse(fields, RopeParameters)
    if rope.rope_type not in KINDS:
        raise ConfigError(f"config.json: rope type {rope.rope_type!r} is not supported; {', '.join(KINDS)} are")
    if rope.rope_type in ("linear", "dynamic", "llama3") and rope.factor is None:
        raise ConfigError(f"config.json: rope type {rope.rope_type!r} needs `factor`")
    if rope.rope_type == "llama3" and (rope.low_freq_factor is None or rope.high_freq_factor is None):
        raise ConfigError("config.json: rope type 'llama3' needs `low_freq_factor` and `high_freq_factor`")
    if rope.rope_type == "llama3" and rope.low_freq_factor == rope.high_freq_factor:
        raise ConfigError(f"config.json: low_freq_factor and high_freq_factor are both {rope.low_freq_factor:g}")
    if rope.partial_rotary_factor != 1.0:
        raise ConfigError(f"config.json: partial_rotary_factor {rope.partial_rotary_factor} is not supported; 1 is")
    return rope


class RotaryEmbedding:
    """The rotations of q and k at each position."""

    def __init__(self, rope: RopeParameters, head_dim: int, max_positions: int) -> None:
        """Raises ConfigError for parameters that give no finite rotations."""
        check_rotations(rope, head_dim, max_positions)
        self._rope, self._head_dim, self._trained_positions = rope, head_dim, max_positions
        self.max_positions = extended_length(rope, max_positions)
        self._table: Tensor | None = None  # [positions, 1, head_dim / 2] complex64

    def prepare(self, max_model_len: int, device: torch.device) -> None:
        table = rotation_table(self._rope, self._head_dim, self._trained_positions, max_model_len)
        self._table = table.unsqueeze(1).to(device)

    def __call__(self, positions: Tensor) -> Tensor:
        """Looks up rotations: positions [tokens] -> [tokens, 1, head_dim / 2]."""
        assert self._table is not None
        return self._table.index_select(0, positions)


def extended_length(rope: RopeParameters | None, max_positions: int) -> int:
    """Returns the length of the longest sequence that the RoPE scaling supports."""
    if rope is None or rope.factor is None or rope.rope_type in ("default", "llama3"):
        return max_positions
    if rope.rope_type == "yarn" and rope.original_max_position_embeddings is not None:
        return max(max_positions, int(rope.original_max_position_embeddings * rope.factor))
    return int(max_positions * rope.factor)


def rotation_table(rope: RopeParameters, head_dim: int, max_positions: int, length: int) -> Tensor:
    """Returns the complex factors of q and k at each position, [length, head_dim / 2] complex64.

    For "dynamic" the factors depend only on the position: up to `max_positions` they are unscaled, and after it they
    are scaled for a sequence that ends at the position. transformers computes the same when it generates token by
    token. Chunks of a long prompt cannot change the result.
    """
    positions = torch.arange(length, dtype=torch.float32)
    inverse, scale = _frequencies(rope, head_dim, max_positions, length)
    angles = positions[:, None] * inverse
    return torch.polar(torch.full_like(angles, scale), angles)


def check_rotations(rope: RopeParameters, head_dim: int, max_positions: int) -> None:
    """Checks that the rotations are finite. Raises ConfigError if they are not, or cannot be computed."""
    try:
        inverse, scale = _frequencies(rope, head_dim, max_positions, length=1)
    except (ArithmeticError, ValueError) as e:
        raise ConfigError(f"config.json: rope parameters {_describe(rope)} cannot be computed with: {e}") from e
    if not (bool(inverse.isfinite().all()) and math.isfinite(scale)):
        raise ConfigError(f"config.json: rope parameters {_describe(rope)} give rotations that are not finite")


def _describe(rope: RopeParameters) -> str:
    return msgspec.json.encode({k: v for k, v in msgspec.structs.asdict(rope).items() if v is not None}).decode()


def _frequencies(rope: RopeParameters, head_dim: int, max_positions: int, length: int) -> tuple[Tensor, float]:
    """Returns the inverse frequencies, shared by all positions or one row for each, and the factor of cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inverse = 1.0 / (rope.rope_theta**exponents)
    scale = 1.0
    if rope.rope_type == "linear":
        inverse = inverse / _factor(rope)
    elif rope.rope_type == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.rope_type == "yarn":
        inverse, scale = _yarn(rope, head_dim, max_positions)
    elif rope.rope_type == "dynamic":
        inverse = _dynamic(rope, exponents, head_dim, max_positions, length)
    return inverse, scale


def _factor(rope: RopeParameters) -> float:
    assert rope.factor is not None  # read_rope has checked it
    return rope.factor


def _dynamic(rope: RopeParameters, exponents: Tensor, head_dim: int, max_positions: int, length: int) -> Tensor:
    """Returns inverse frequencies [length, head_dim / 2]: each position has its own base."""
    factor = _factor(rope)
    seen = torch.arange(1, length + 1, dtype=torch.float64).clamp_(min=max_positions)
    grown = (factor * seen / max_positions - (factor - 1)) ** (head_dim / (head_dim - 2))
    return 1.0 / ((rope.rope_theta * grown).float()[:, None] ** exponents)


def _llama3(rope: RopeParameters, inverse: Tensor) -> Tensor:
    assert rope.low_freq_factor is not None
    assert rope.high_freq_factor is not None
    assert rope.original_max_position_embeddings is not None
    low, high, trained = rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inverse
    scaled = torch.where(wavelength > trained / low, inverse / _factor(rope), inverse)
    smooth = (trained / wavelength - low) / (high - low)
    between = (1 - smooth) * scaled / _factor(rope) + smooth * scaled
    is_between = ~(wavelength < trained / high) & ~(wavelength > trained / low)
    return torch.where(is_between, between, scaled)


def _yarn(rope: RopeParameters, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Returns the inverse frequencies and the factor of cos and sin."""
    trained = rope.original_max_position_embeddings or max_positions
    factor = rope.factor if rope.factor is not None else max_positions / trained

    def boundary(rotations: float) -> float:
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = boundary(rope.beta_fast or 32), boundary(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp_(0, 1)
    frequencies = rope.rope_theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    inverse = (1.0 / (factor * frequencies)) * ramp + (1.0 / frequencies) * (1 - ramp)
    return inverse, _yarn_scale(rope, factor)


def _yarn_scale(rope: RopeParameters, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
