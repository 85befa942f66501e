"""Rotary position embeddings (RoPE): the complex rotations of each position, as tables.

A table always turns whole heads: where a part of a head is not rotated, the table is padded with 1 + 0i, so that
kernels know one kind of rotation. Where checkpoints pair the two halves of a head, the loader reorders the weights to
pairs side by side (`kernels/layers/apply_rope.py`); checkpoints with pairs side by side keep their order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from blockyard.services.gpu_worker.layers.rope_parameters import RopeParameters
from blockyard.shared.context_length import extended_length
from blockyard.shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rotation:
    """How the layers of one kind change q and k in a step."""

    angles: Tensor | None = None  # [tokens, 1, head_dim / 2] complex64, which q and k are multiplied by; None: not
    query_scale: Tensor | None = None  # [tokens, 1, 1] in the dtype of the model, which q is multiplied by; None: not


NO_ROTATION = Rotation()


class RotaryEmbedding:
    """The rotations of q and k at each position."""

    def __init__(self, rope: RopeParameters, head_dim: int, max_positions: int) -> None:
        """Raises ConfigError for parameters that give no finite rotations."""
        self.rotary_dim = rope.rotary_dim(head_dim)  # numbers of a head that are rotated, the first ones
        self.factor = check_rotations(rope, head_dim, max_positions)  # of cos and sin
        self._rope, self._head_dim, self._trained_positions = rope, head_dim, max_positions
        trained = rope.original_max_position_embeddings
        self.max_positions = extended_length(rope.rope_type, rope.factor, trained, max_positions)
        self.rope_type = rope.rope_type
        self._table: Tensor | None = None  # [positions, 1, head_dim / 2] complex64, of each linear factor in turn
        self._query_scales: Tensor | None = None  # [positions, 1, 1]

    def prepare(
        self, max_model_len: int, device: torch.device, dtype: torch.dtype, long_factors: Sequence[int] = ()
    ) -> list[str]:
        """Computes the tables for sequences of up to this length. Returns lines about choices that follow from it.

        long_factors: the table goes on with positions that are divided by each of these.
        """
        parts = [
            rotation_table(self._rope, self._head_dim, self._trained_positions, max_model_len, factor)
            for factor in (1, *long_factors)
        ]
        self._table = torch.cat(parts).unsqueeze(1).to(device)
        beta, trained = self._rope.llama_4_scaling_beta, self._rope.original_max_position_embeddings
        if beta is not None and trained is not None:
            grown = 1 + beta * torch.log1p(torch.arange(max_model_len).div(trained, rounding_mode="floor"))
            self._query_scales = grown.to(device, dtype)[:, None, None]
        if self._rope.rope_type != "longrope":
            return []
        kind, sign = ("long", "over") if _is_long(self._rope, max_model_len) else ("short", "up to")
        return [f"rotation: {kind}_factor of longrope, as a context of {max_model_len} tokens is {sign} {trained}"]

    def __call__(self, positions: Tensor) -> Rotation:
        """Looks up the rotations of positions [tokens]."""
        assert self._table is not None
        scales = self._query_scales
        return Rotation(
            self._table.index_select(0, positions), None if scales is None else scales.index_select(0, positions)
        )

    def tensors(self) -> list[Tensor]:
        return [one for one in (self._table, self._query_scales) if one is not None]


class QueryScales:
    """Queries that grow with the logarithm of their position, in layers that do not rotate
    (https://arxiv.org/abs/2501.19399)."""

    rotary_dim = 0

    def __init__(self, floor_scale: int, factor: float, max_positions: int) -> None:
        """floor_scale: positions that have the same scale. factor: of the logarithm."""
        self.max_positions = max_positions
        self._floor_scale, self._factor = floor_scale, factor
        self._scales: Tensor | None = None  # [positions, 1, 1]

    def prepare(self, max_model_len: int, device: torch.device, dtype: torch.dtype) -> list[str]:
        """Computes the scales for sequences of up to this length."""
        counted = torch.arange(1, max_model_len + 1).div(self._floor_scale, rounding_mode="floor")
        self._scales = (1 + self._factor * torch.log1p(counted)).to(device, dtype)[:, None, None]
        return []

    def __call__(self, positions: Tensor) -> Rotation:
        """Looks up the scales of positions [tokens]."""
        assert self._scales is not None
        return Rotation(query_scale=self._scales.index_select(0, positions))

    def tensors(self) -> list[Tensor]:
        return [self._scales] if self._scales is not None else []


class LayerRotations:
    """The rotations of each layer of a model. Layers of one kind share theirs."""

    def __init__(self, layers: Sequence[RotaryEmbedding | QueryScales | None]) -> None:
        """layers: of each layer; None: its q and k are not rotated."""
        self._layers = layers
        self._kinds = list({id(rotary): rotary for rotary in layers if rotary is not None}.values())

    def of_layers(self, layers: range) -> "LayerRotations":
        """Returns the rotations of these layers alone."""
        return LayerRotations(self._layers[layers.start : layers.stop])

    @property
    def takes_factors(self) -> bool:
        """Whether linear factors of adapters for longer contexts have a meaning: all rotations are plain or linear."""
        return bool(self._kinds) and all(
            isinstance(rotary, RotaryEmbedding) and rotary.rope_type in ("default", "linear") for rotary in self._kinds
        )

    def prepare(
        self, max_model_len: int, device: torch.device, dtype: torch.dtype, long_factors: Sequence[int] = ()
    ) -> list[str]:
        """long_factors: see `RotaryEmbedding`; none unless `takes_factors`."""
        lines: list[str] = []
        for rotary in self._kinds:
            if isinstance(rotary, RotaryEmbedding):
                lines += rotary.prepare(max_model_len, device, dtype, long_factors)
            else:
                lines += rotary.prepare(max_model_len, device, dtype)
        return lines

    def tensors(self) -> list[Tensor]:
        """What `prepare` has made."""
        return [tensor for rotary in self._kinds for tensor in rotary.tensors()]

    def __call__(self, positions: Tensor) -> list[Rotation]:
        """Looks up the rotation of each layer: positions [tokens]."""
        found = {id(rotary): rotary(positions) for rotary in self._kinds}
        return [found[id(rotary)] if rotary is not None else NO_ROTATION for rotary in self._layers]


def rotation_table(rope: RopeParameters, head_dim: int, max_positions: int, length: int, divisor: int = 1) -> Tensor:
    """Returns the complex factors of q and k at each position, [length, head_dim / 2] complex64.

    divisor: of positions.

    For "dynamic" the factors depend only on the position: up to `max_positions` they are unscaled, and after it they
    are scaled for a sequence that ends at the position. transformers computes the same when it generates token by
    token. Chunks of a long prompt cannot change the result.
    """
    positions = torch.arange(length, dtype=torch.float32)
    inverse, scale = _frequencies(rope, rope.rotary_dim(head_dim), max_positions, length)
    inverse = inverse / divisor
    angles = positions[:, None] * inverse
    rotated = torch.polar(torch.full_like(angles, scale), angles)
    return torch.cat((rotated, torch.ones(length, head_dim // 2 - rotated.shape[1], dtype=rotated.dtype)), 1)


def check_rotations(rope: RopeParameters, head_dim: int, max_positions: int) -> float:
    """Returns the factor of cos and sin. Raises ConfigError for rotations that are not finite or not computable."""
    try:
        inverse, scale = _frequencies(rope, rope.rotary_dim(head_dim), max_positions, length=1)
    except (ArithmeticError, ValueError) as e:
        raise ConfigError(f"config.json: rope parameters {_describe(rope)} cannot be computed with: {e}") from e
    if not (bool(inverse.isfinite().all()) and math.isfinite(scale)):
        raise ConfigError(f"config.json: rope parameters {_describe(rope)} give rotations that are not finite")
    return scale


def _describe(rope: RopeParameters) -> str:
    return msgspec.json.encode({k: v for k, v in msgspec.structs.asdict(rope).items() if v is not None}).decode()


def _frequencies(rope: RopeParameters, dim: int, max_positions: int, length: int) -> tuple[Tensor, float]:
    """Returns the inverse frequencies, shared by all positions or one row for each, and the factor of cos and sin.

    dim: numbers of a head that are rotated. length: of the longest sequence.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inverse = 1.0 / (rope.rope_theta**exponents)
    scale = 1.0
    if rope.rope_type == "linear":
        inverse = inverse / _factor(rope)
    elif rope.rope_type == "llama3":
        inverse = _llama3(rope, inverse)
    elif rope.rope_type == "yarn":
        inverse, scale = _yarn(rope, dim, max_positions)
    elif rope.rope_type == "dynamic":
        inverse = _dynamic(rope, exponents, dim, max_positions, length)
    elif rope.rope_type == "longrope":
        inverse, scale = _longrope(rope, inverse, max_positions, length)
    elif rope.rope_type == "proportional":
        inverse[int(rope.partial_rotary_factor * dim // 2) :] = 0.0
        inverse = inverse / (rope.factor or 1.0)
    return inverse, scale


def _is_long(rope: RopeParameters, length: int) -> bool:
    assert rope.original_max_position_embeddings is not None  # read_rope has set it
    return length > rope.original_max_position_embeddings


def _longrope(rope: RopeParameters, inverse: Tensor, max_positions: int, length: int) -> tuple[Tensor, float]:
    """Returns the inverse frequencies and the factor of cos and sin (https://arxiv.org/abs/2402.13753)."""
    factors = rope.long_factor if _is_long(rope, length) else rope.short_factor
    assert factors is not None
    assert rope.original_max_position_embeddings is not None
    if {len(inverse)} != {len(rope.short_factor or ()), len(rope.long_factor or ())}:
        raise ValueError(f"short_factor and long_factor must have {len(inverse)} numbers each")
    grown = rope.factor or max_positions / rope.original_max_position_embeddings
    scale = math.sqrt(1 + math.log(grown) / math.log(rope.original_max_position_embeddings)) if grown > 1 else 1.0
    return inverse / torch.tensor(factors), rope.attention_factor or scale


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
    if low == high:  # as in Llama 4: nothing is in between
        return scaled
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
