"""Codes and scales of quantized weights as kernels of experts read them, and how inputs are rounded."""

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.int_math import ceil_div

E8M0 = torch.float8_e8m0fnu
_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_SIZES, *(-size for size in _SIZES))


class Codes(enum.IntEnum):
    """What codes stand for. Kernels know these by number; up to TABLE4 a byte has two codes, the first one below."""

    INT4 = 1  # 0 to 15; without zeros less 8
    E2M1 = 2  # floats of 4 bits
    TABLE4 = 3  # numbers of a table of 16
    INT8 = 4
    UINT8 = 5
    E4M3 = 6


class RoundedTo(enum.IntEnum):
    """How inputs are rounded before a product. Kernels know these by number."""

    NONE = 0
    E4M3 = 1
    INT8 = 2  # symmetric
    ASYMMETRIC_INT8 = 3  # with a zero


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRounding:
    """How inputs are rounded: each row, or each row and `group` inputs, by their largest number or by static scales."""

    kind: RoundedTo = RoundedTo.NONE
    group: int = 0  # inputs of a scale; 0: all of a row
    most: float | None = None  # a row counts as having at most this absolute value
    high: Tensor | None = None  # one number: the scale of all; of ASYMMETRIC_INT8 the largest number, and
    low: Tensor | None = None  # the smallest one, negated


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """A weight [experts, outputs, inputs]: (code - zero) * scale * row_scale.

    Scales and zeros are [experts, outputs, ceil(inputs / group)]. Scales of e8m0 are kept as bytes.
    """

    codes: Tensor  # [experts, outputs, ceil(inputs / codes of a byte)]
    kind: Codes
    inputs: int
    group: int = 0  # inputs of a scale; 0: there are scales of rows alone
    scales: Tensor | None = None
    zeros: Tensor | None = None  # without groups [experts, outputs]
    row_scales: Tensor | None = None  # float or 16 bits [experts, outputs]
    table: Tensor | None = None  # float32 [16]
    is_e8m0: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.codes.shape[0], self.codes.shape[1], self.inputs

    @property
    def key(self) -> str:
        """The form and its parameters, as caches of measured configs name them."""
        scales = "" if self.scales is None else f"-{_short(self.scales)}"
        scales += "-e8m0" if self.is_e8m0 else ""
        zeros = "" if self.zeros is None else f"-zeros-{_short(self.zeros)}"
        rows = "" if self.row_scales is None else f"-rows-{_short(self.row_scales)}"
        return f"{self.kind.name.lower()}-{self.group or 'row'}{scales}{zeros}{rows}"

    def tensors(self) -> list[Tensor]:
        made = (self.codes, self.scales, self.zeros, self.row_scales, self.table)
        return [one for one in made if one is not None]

    def check(self) -> None:
        """Raises ValueError for shapes, dtypes and layouts that kernels do not read."""
        experts, outs, inputs = self.shape
        packed = 2 if self.kind <= Codes.TABLE4 else 1
        if self.codes.shape[2] != ceil_div(inputs, packed) or not all(one.is_contiguous() for one in self.tensors()):
            raise ValueError(f"codes {list(self.codes.shape)} of {inputs} inputs must be contiguous, as all tensors")
        if self.group and packed == 2 and self.group % 2:
            raise ValueError(f"groups must be of an even number of inputs, got {self.group}")
        whole = (experts, outs, ceil_div(inputs, self.group)) if self.group else (experts, outs)
        for one, shape in ((self.scales, whole), (self.zeros, whole), (self.row_scales, (experts, outs))):
            if one is not None and one.shape != shape:
                raise ValueError(f"scales and zeros must be {list(shape)}, got {list(one.shape)}")
        if (self.group > 0) != (self.scales is not None) or (self.kind is Codes.TABLE4) != (self.table is not None):
            raise ValueError("groups have scales, and codes of a table have one")


def dequantized(weights: PackedWeights) -> Tensor:
    """The reference of all kernels: the numbers that weights stand for, float64 [experts, outputs, inputs]."""
    codes, inputs = weights.codes, weights.inputs
    if weights.kind <= Codes.TABLE4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[..., :inputs]
    if weights.kind is Codes.E2M1:
        made = torch.tensor(_E2M1, dtype=torch.float64, device=codes.device)[codes.long()]
    elif weights.table is not None:
        made = weights.table.double()[codes.long()]
    else:
        made = codes.double()
    if weights.zeros is not None:
        made = made - _expand(weights.zeros.double(), weights)
    elif weights.kind is Codes.INT4:
        made = made - 8
    if weights.scales is not None:
        scales = weights.scales.view(E8M0).float() if weights.is_e8m0 else weights.scales
        made = made * _expand(scales.double(), weights)
    return made if weights.row_scales is None else made * weights.row_scales.double()[..., None]


def _expand(scales: Tensor, weights: PackedWeights) -> Tensor:
    if not weights.group:
        return scales[..., None]
    return scales.repeat_interleave(weights.group, -1)[..., : weights.inputs]


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
