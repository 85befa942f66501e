"""Residual addition and LayerNorm (https://arxiv.org/abs/1607.06450) in one pass, on a GPU."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import next_power_of_2
from blockyard.kernels.layers.add_rms_norm import LONGEST_ROW
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl


def add_layer_norm_reference(
    residual: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, keeps_sum: bool = True
) -> Tensor:
    x = residual.float() + delta.float()
    if keeps_sum:
        x = residual.copy_(x).float()
    scale, shift = (None if one is None else one.float() for one in (weight, bias))
    return F.layer_norm(x, x.shape[-1:], scale, shift, eps).to(residual.dtype)


@triton.jit
def _add_layer_norm_kernel(
    residual_ptr, delta_ptr, weight_ptr, bias_ptr, out_ptr, residual_stride, delta_stride, size, eps,
    KEEPS_SUM: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program i: row i
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, TILE)
    inside = cols < size
    if WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(delta_ptr + row * delta_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if KEEPS_SUM:
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * residual_stride + cols, rounded, mask=inside)
        x = rounded.to(tl.float32)  # normalised as the next layer reads it, rounded
    x = tl.where(inside, x - tl.sum(x, 0) / size, 0.0)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    if WEIGHT:
        x = x * weight
    if BIAS:
        x = x + bias
    tl.store(out_ptr + row * size + cols, x, mask=inside)


def add_layer_norm(
    residual: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, keeps_sum: bool = True
) -> Tensor:
    """residual [rows, size] += delta [rows, size], in place; returns its LayerNorm, contiguous.

    weight, bias: [size], None: there is none. Mean and variance are in float32. keeps_sum: False leaves residual as it
    is, and the sum that is normalised is not rounded. Rows may be strided. Raises ValueError for other shapes, dtypes
    that differ and rows over LONGEST_ROW.
    """
    _check(residual, delta, weight, bias)
    rows, size = residual.shape
    out = torch.empty((rows, size), dtype=residual.dtype, device=residual.device)
    if out.numel():
        tile, pdl = next_power_of_2(size), supports_pdl(residual.device)
        _add_layer_norm_kernel[(rows,)](
            residual, delta, out if weight is None else weight, out if bias is None else bias, out,
            residual.stride(0), delta.stride(0), size, eps,
            KEEPS_SUM=keeps_sum, WEIGHT=weight is not None, BIAS=bias is not None, TILE=tile, PDL=pdl,
            num_warps=min(max(tile // 512, 1), 16), **pdl_options(pdl),
        )  # fmt: skip
    return out


def _check(residual: Tensor, delta: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Raises ValueError."""
    size = residual.shape[-1]
    vectors = [one for one in (weight, bias) if one is not None]
    if residual.ndim != 2 or delta.shape != residual.shape or any(one.shape != (size,) for one in vectors):
        shapes = [list(one.shape) for one in (delta, *vectors)]
        raise ValueError(f"delta, weight and bias {shapes} do not fit {list(residual.shape)}")
    if any(one.dtype != residual.dtype for one in (delta, *vectors)):
        raise ValueError(f"dtypes differ: {residual.dtype}, {[one.dtype for one in (delta, *vectors)]}")
    if residual.stride(1) != 1 or delta.stride(1) != 1 or not all(one.is_contiguous() for one in vectors):
        raise ValueError("the elements of a row must be contiguous")
    if size > LONGEST_ROW:
        raise ValueError(f"rows of {size} are longer than {LONGEST_ROW}")
