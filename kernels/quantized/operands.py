"""Operands of products with weights and inputs of 8 bits, and their product in plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor

from blockyard.kernels.layers.rounding import E4M3, RoundedRows


class Weight8Bit(NamedTuple):
    """A weight [out, in] in e4m3 or int8."""

    codes: Tensor  # [out, in], contiguous
    scales: Tensor  # float32 [out], [out, groups] or [blocks of outputs, groups], contiguous
    group: int | None = None  # inputs of a scale, of which the last may be fewer; None: all
    block: int = 1  # outputs of a scale of a group, of which the last may be fewer


def linear_w8a8_reference(x: RoundedRows, weight: Weight8Bit, bias: Tensor | None = None) -> Tensor:
    """[rows, out] in float64."""

    def numbers(codes: Tensor, scales: Tensor) -> Tensor:
        by_number = scales[:, None] if scales.dim() == 1 else scales.repeat_interleave(weight.group or 1, 1)
        return codes.double() * by_number[:, : codes.shape[1]].double()

    by_out = weight.scales.repeat_interleave(weight.block, 0)[: len(weight.codes)]
    y = numbers(x.codes, x.scales) @ numbers(weight.codes, by_out).T
    return y if bias is None else y + bias.double()


def check_operands(x: RoundedRows, weight: Weight8Bit, bias: Tensor | None) -> None:
    """Raises ValueError for operands that do not fit each other, or are not contiguous."""
    (rows, size), outs = x.codes.shape, weight.codes.shape[0]
    groups = () if weight.group is None else (-(-size // weight.group),)
    if weight.codes.shape != (outs, size) or (bias is not None and bias.shape != (outs,)):
        raise ValueError(f"rows {[rows, size]} do not fit a weight {list(weight.codes.shape)}")
    if weight.scales.shape != (-(-outs // weight.block), *groups) or x.scales.shape != (rows, *groups):
        raise ValueError(f"scales {list(x.scales.shape)} and {list(weight.scales.shape)} do not fit groups {groups}")
    if x.codes.dtype != weight.codes.dtype or weight.codes.dtype not in (E4M3, torch.int8):
        raise ValueError(f"dtypes differ, or are not e4m3 or int8: {x.codes.dtype}, {weight.codes.dtype}")
    given = (x.codes, weight.codes, weight.scales, *(() if bias is None else (bias,)))
    if not all(one.is_contiguous() for one in given) or (rows > 1 and x.scales.stride(0) != 1):
        raise ValueError("operands must be contiguous, scales of inputs along the rows")
