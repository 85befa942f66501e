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
    rows, size = x.codes.shape
    check_weight(size, weight, bias)
    if x.scales.shape != (rows, *weight.scales.shape[1:]) or x.codes.dtype != weight.codes.dtype:
        raise ValueError(
            f"scales {list(x.scales.shape)} and {list(weight.scales.shape)} or dtypes differ: {x.codes.dtype}, "
            f"{weight.codes.dtype}"
        )
    if not x.codes.is_contiguous() or (rows > 1 and x.scales.stride(0) != 1):
        raise ValueError("operands must be contiguous, scales of inputs along the rows")


def check_weight(size: int, weight: Weight8Bit, bias: Tensor | None) -> None:
    """Raises ValueError for a weight or a bias that does not fit rows of `size`, or is not contiguous."""
    outs = weight.codes.shape[0]
    groups = () if weight.group is None else (-(-size // weight.group),)
    if weight.codes.shape != (outs, size) or (bias is not None and bias.shape != (outs,)):
        raise ValueError(f"rows of {size} do not fit a weight {list(weight.codes.shape)}")
    if weight.scales.shape != (-(-outs // weight.block), *groups):
        raise ValueError(f"scales {list(weight.scales.shape)} do not fit groups {groups}")
    if weight.codes.dtype not in (E4M3, torch.int8):
        raise ValueError(f"weights are e4m3 or int8, not {weight.codes.dtype}")
    if not all(one.is_contiguous() for one in (weight.codes, weight.scales, *(() if bias is None else (bias,)))):
        raise ValueError("operands must be contiguous")
