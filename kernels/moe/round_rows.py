"""Inputs of experts rounded to 8 bits, each row by itself, before a product whose weights have 8 bits too; on a GPU.

A scale is that of a row, or of a row and a group of inputs: their largest absolute value becomes the largest code.
`round_rows` writes codes and scales for products on tensor cores. Products without them round what they have loaded
by `rounded`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.rounding import FLOOR, divided
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl
from blockyard.kernels.quantized.packed_weights import ExpertRounding, RoundedTo

_MOST_TILE = 8192


def round_rows_reference(x: Tensor, rounding: ExpertRounding) -> tuple[Tensor, Tensor]:
    """Codes as float32 [rows, in], less their zeros, and scales [rows, groups]."""
    groups = list(x.float().split(rounding.group or max(x.shape[1], 1), 1))
    made = [_reference_of(one, rounding) for one in groups]
    return torch.cat([codes for codes, _ in made], 1), torch.cat([scales for _, scales in made], 1)


def _reference_of(x: Tensor, rounding: ExpertRounding) -> tuple[Tensor, Tensor]:
    if rounding.kind is RoundedTo.ASYMMETRIC_INT8:
        if rounding.high is not None and rounding.low is not None:
            high, low = rounding.high.expand(len(x), 1), -rounding.low.expand(len(x), 1)
        else:
            high, low = x.amax(1, keepdim=True).clamp(min=0), x.amin(1, keepdim=True).clamp(max=0)
        scales = divided(high - low, 255).clamp(min=FLOOR)
        zeros = (-128 - low / scales).round().clamp(-128, 127)
        return (x / scales + zeros).round().clamp(-128, 127) - zeros, scales
    if rounding.high is not None:
        scales = rounding.high.float().expand(len(x), 1)
    else:
        largest = x.abs().amax(1, keepdim=True)
        largest = largest if rounding.most is None else largest.clamp(max=rounding.most)
        scales = divided(largest, 448.0 if rounding.kind is RoundedTo.E4M3 else 127.0)
    scales = scales.clamp(min=FLOOR)
    if rounding.kind is RoundedTo.E4M3:
        return (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float(), scales
    return (x / scales).round().clamp(-128, 127), scales


@triton.jit
def _nearest(x):
    """Whole numbers, of a tie the even one; x: from -2 ** 22 to 2 ** 22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def symmetric_scale(largest, most, high_ptr, ROUND: tl.constexpr, STATIC: tl.constexpr, MOST: tl.constexpr):
    """The scale of inputs with this largest absolute value; STATIC: the one in memory."""
    if STATIC:
        scale = tl.load(high_ptr).to(tl.float32)
        return tl.zeros_like(largest) + tl.maximum(scale, 1e-12)
    else:  # noqa: RET505, only one branch is compiled
        if MOST:
            largest = tl.minimum(largest, most)
        return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, 448.0 if ROUND == 1 else 127.0, tl.float32)), 1e-12)


@triton.jit
def asymmetric_scale(high, low, high_ptr, low_ptr, STATIC: tl.constexpr):
    """The scale and the zero of inputs between these numbers, or between numbers in memory."""
    if STATIC:
        high = tl.zeros_like(high) + tl.load(high_ptr).to(tl.float32)
        low = tl.zeros_like(low) - tl.load(low_ptr).to(tl.float32)
    else:
        high, low = tl.maximum(high, 0.0), tl.minimum(low, 0.0)
    scale = tl.maximum(tl.div_rn(high - low, tl.full(high.shape, 255.0, tl.float32)), 1e-12)
    zero = _nearest(tl.minimum(tl.maximum(-128.0 - tl.div_rn(low, scale), -128.0), 127.0))
    return scale, zero


@triton.jit
def to_code(x, scale, zero, ROUND: tl.constexpr):
    """Codes as float32, less their zeros. scale and zero have the shape of x."""
    y = tl.div_rn(x, scale)
    if ROUND == 1:
        return tl.minimum(tl.maximum(y, -448.0), 448.0).to(tl.float8e4nv).to(tl.float32)
    else:  # noqa: RET505, only one branch is compiled
        if ROUND == 3:
            y += zero
        return _nearest(tl.minimum(tl.maximum(y, -128.0), 127.0)) - zero


@triton.jit
def scales_of_rows(
    rows, most, high_ptr, low_ptr,
    ROUND: tl.constexpr, STATIC: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The scale and the zero of each of the whole rows [k, size], for `rounded`; 1 and 0 with groups."""
    if ROUND == 3:
        return asymmetric_scale(tl.max(rows, 1), tl.min(rows, 1), high_ptr, low_ptr, STATIC)
    elif ROUND and not GROUP:  # noqa: RET505, only one branch is compiled
        return symmetric_scale(tl.max(tl.abs(rows), 1), most, high_ptr, ROUND, STATIC, MOST), 0.0
    else:
        return 1.0, 0.0


@triton.jit
def rounded(
    x, scale, zero, most, high_ptr,
    ROUND: tl.constexpr, STATIC: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """x float32 [k, TILE] as products see it. scale, zero: of `scales_of_rows`. GROUP: it divides TILE; 0: a row."""
    K: tl.constexpr = x.shape[0]
    TILE: tl.constexpr = x.shape[1]
    if ROUND == 0:
        return x
    elif GROUP:  # noqa: RET505, only one branch is compiled
        parts = tl.reshape(x, [K, TILE // GROUP, GROUP])
        scale = symmetric_scale(tl.max(tl.abs(parts), 2), most, high_ptr, ROUND, STATIC, MOST)[:, :, None]
        scale = tl.broadcast_to(scale, parts.shape)
        return tl.reshape(to_code(parts, scale, 0.0, ROUND) * scale, [K, TILE])
    else:
        if ROUND == 3:
            zero = tl.broadcast_to(zero[:, None], x.shape)
        scale = tl.broadcast_to(scale[:, None], x.shape)
        return to_code(x, scale, zero, ROUND) * scale


@triton.jit
def _round_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, high_ptr, low_ptr, size, most,
    GROUP: tl.constexpr, ROUND: tl.constexpr, STATIC: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (r, g): group g of row r, or all of row r in PARTS tiles
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = group * GROUP
    last = tl.minimum(first + GROUP, size) if GROUP else size
    high = tl.zeros([1], tl.float32)
    low = tl.zeros([1], tl.float32)
    for part in tl.static_range(PARTS):
        cols = first + part * TILE + tl.arange(0, TILE)
        x = tl.load(x_ptr + row * size + cols, mask=cols < last, other=0.0).to(tl.float32)
        high = tl.maximum(high, tl.max(x, 0))
        low = tl.minimum(low, tl.min(x, 0))
    if ROUND == 3:
        scale, zero = asymmetric_scale(high, low, high_ptr, low_ptr, STATIC)
        zero = tl.broadcast_to(zero, [TILE])
    else:
        scale = symmetric_scale(tl.maximum(high, -low), most, high_ptr, ROUND, STATIC, MOST)
        zero = 0.0
    tl.store(scales_ptr + row * tl.num_programs(1) + group + tl.arange(0, 1), scale)
    scale = tl.broadcast_to(scale, [TILE])
    for part in tl.static_range(PARTS):
        cols = first + part * TILE + tl.arange(0, TILE)
        if PARTS > 1:
            x = tl.load(x_ptr + row * size + cols, mask=cols < last, other=0.0).to(tl.float32)
        code = to_code(x, scale, zero, ROUND)
        tl.store(codes_ptr + row * size + cols, code.to(codes_ptr.dtype.element_ty), mask=cols < last)


def round_rows(x: Tensor, rounding: ExpertRounding) -> tuple[Tensor, Tensor]:
    """x [rows, in] -> codes [rows, in] and scales float32 [rows, groups].

    Codes are e4m3 or int8; of ASYMMETRIC_INT8 they are numbers in the dtype of x, less the zero of their row. x is
    contiguous. Raises ValueError if it is not.
    """
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")
    rows, size = x.shape
    dtype = {RoundedTo.E4M3: torch.float8_e4m3fn, RoundedTo.INT8: torch.int8}.get(rounding.kind, x.dtype)
    group = rounding.group if rounding.group < size else 0
    groups = ceil_div(size, group) if group else 1
    codes = torch.empty((rows, size), dtype=dtype, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if codes.numel():
        tile, pdl = min(next_power_of_2(group or size), _MOST_TILE), supports_pdl(x.device)
        _round_rows_kernel[(rows, groups)](
            x, codes, scales, scales if rounding.high is None else rounding.high,
            scales if rounding.low is None else rounding.low, size, 0.0 if rounding.most is None else rounding.most,
            GROUP=group, ROUND=int(rounding.kind), STATIC=rounding.high is not None, MOST=rounding.most is not None,
            TILE=tile, PARTS=ceil_div(group or size, tile), PDL=pdl,
            num_warps=1 if tile <= 256 else 4 if tile <= 4096 else 8, **pdl_options(pdl),
        )  # fmt: skip
    return codes, scales
