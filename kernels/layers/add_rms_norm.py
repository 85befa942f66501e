"""Residual add and RMSNorm in one pass, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import next_power_of_2
from blockyard.kernels.layers.round_row import (
    allocate,
    bound,
    check_rounding,
    is_bounded,
    scales_stride,
    static_scale,
    store_rounded,
)
from blockyard.kernels.layers.rounding import InputRounding, RoundedRows
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

LONGEST_ROW = 32768  # elements; a program holds a whole row


def add_rms_norm_reference(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if delta is not None:
        residual.copy_(residual.float() + (delta.float().sum(1) if delta.dim() == 3 else delta.float()))
    x = residual.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()).to(residual.dtype)


@triton.jit(do_not_specialize=["scales_stride"])
def _add_rms_norm_kernel(
    residual_ptr, delta_ptr, weight_ptr, out_ptr, total_ptr, scales_ptr, scale_ptr, residual_stride, delta_stride,
    addend_stride, total_stride, scales_stride, size, eps, most,
    ADDENDS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr, ROUND: tl.constexpr = False,
    GROUP: tl.constexpr = 0, STATIC: tl.constexpr = False, BOUNDED: tl.constexpr = False,
):  # fmt: skip
    # program i: row i
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, TILE)
    inside = cols < size
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    x = tl.load(residual_ptr + row * residual_stride + cols, mask=inside, other=0.0).to(tl.float32)
    if ADDENDS > 0:
        total = tl.zeros([TILE], tl.float32)
        for i in tl.static_range(ADDENDS):
            delta = delta_ptr + row * delta_stride + i * addend_stride + cols
            total += tl.load(delta, mask=inside, other=0.0).to(tl.float32)
        x += total
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(total_ptr + row * total_stride + cols, rounded, mask=inside)
        x = rounded.to(tl.float32)  # normalised as the next layer reads it, rounded
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    x = x * scale * weight
    if ROUND:  # of what other products read, rounded
        x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
        store_rounded(x, out_ptr, scales_ptr, scale_ptr, row, size, scales_stride, most, TILE, GROUP, STATIC, BOUNDED)
    else:
        tl.store(out_ptr + row * size + cols, x, mask=inside)


def add_rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, total: Tensor | None = None
) -> Tensor:
    """residual [rows, size] += delta [rows, size], in place; returns its RMSNorm by weight [size], contiguous.

    total: [rows, size] that gets the sum, and residual stays; only with a delta.
    delta may be [rows, addends, size], of which the sum is added, in this order and in float32. Rows may be strided.
    The weight may be float32 where the rows are not: a unit offset was added to it. Raises ValueError for other shapes,
    dtypes that differ and rows over LONGEST_ROW.
    """
    delta, total, addends = _checked(residual, delta, weight, total)
    out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
    if out.numel():
        _launch(residual, delta, weight, eps, total, addends, out, out, out, None)
    return out


def add_rms_norm_rounded(
    residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, rounding: InputRounding
) -> RoundedRows:
    """Same as `add_rms_norm`, but returns its result as `quantize_rows` rounds it."""
    delta, total, addends = _checked(residual, delta, weight, None)
    check_rounding(rounding)
    rows, size = residual.shape
    out = allocate(rows, size, rounding, residual)
    if out.codes.numel():
        scale = static_scale(rounding, out.scales)
        _launch(residual, delta, weight, eps, total, addends, out.codes, out.scales, scale, rounding)
    return out


def _launch(
    residual: Tensor,
    delta: Tensor,
    weight: Tensor,
    eps: float,
    total: Tensor,
    addends: int,
    out: Tensor,
    scales: Tensor,
    scale: Tensor,
    rounding: InputRounding | None,
) -> None:
    """scales, scale: any tensors where rounding is None."""
    rows, size = residual.shape
    tile, pdl = next_power_of_2(size), supports_pdl(residual.device)
    options: dict[str, int] = {}
    if rounding is not None:
        options = {"ROUND": True, "STATIC": rounding.scale is not None, "BOUNDED": is_bounded(rounding)}
    if rounding is not None and rounding.group is not None:
        options["GROUP"], tile = rounding.group, max(tile, rounding.group)
    _add_rms_norm_kernel[(rows,)](
        residual, delta, weight, out, total, scales, scale, residual.stride(0), delta.stride(0), delta.stride(-2),
        total.stride(0), 0 if rounding is None else scales_stride(scales), size, eps,
        0.0 if rounding is None else bound(rounding),
        ADDENDS=addends, TILE=tile, PDL=pdl, num_warps=min(max(tile // 512, 1), 16), **options, **pdl_options(pdl),
    )  # fmt: skip


def _checked(
    residual: Tensor, delta: Tensor | None, weight: Tensor, total: Tensor | None
) -> tuple[Tensor, Tensor, int]:
    """Returns delta and total, or the residual in their place, and the number of addends. Raises ValueError."""
    rows, size = residual.shape
    addends = 0 if delta is None else delta.shape[1] if delta.dim() == 3 else 1
    delta = residual if delta is None else delta
    total = residual if total is None else total
    if delta.shape not in (residual.shape, (rows, addends, size)) or weight.shape != (size,):
        raise ValueError(f"delta {list(delta.shape)} and weight {list(weight.shape)} do not fit {list(residual.shape)}")
    if total.shape != residual.shape or total.dtype != residual.dtype:
        raise ValueError(
            f"total {list(total.shape)} {total.dtype} does not fit {list(residual.shape)} {residual.dtype}"
        )
    if residual.dtype != delta.dtype or weight.dtype not in (residual.dtype, torch.float32):
        raise ValueError(f"dtypes differ: {residual.dtype}, {delta.dtype}, {weight.dtype}")
    if residual.stride(1) != 1 or total.stride(1) != 1 or delta.stride(-1) != 1 or not weight.is_contiguous():
        raise ValueError("the elements of a row must be contiguous")
    if size > LONGEST_ROW:
        raise ValueError(f"rows of {size} are longer than {LONGEST_ROW}")
    return delta, total, addends
