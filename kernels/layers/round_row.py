"""Device functions that round a row to codes of 8 bits, for each kernel that writes rows for such products."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.layers.rounding import E4M3, FLOOR, MOST, ROWS, InputRounding, RoundedRows

_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: a float32 plus and minus this is rounded to an integer, half to even
_FLOOR = tl.constexpr(FLOOR)
_E4M3_MOST = tl.constexpr(MOST[E4M3])
_INT8_MOST = tl.constexpr(MOST[torch.int8])


@triton.jit
def _codes(x, scale, INT8: tl.constexpr):
    ratio = tl.math.div_rn(x, scale)
    if INT8:
        ratio = tl.clamp(ratio, -128.0, _INT8_MOST)
        return ((ratio + _ROUND) - _ROUND).to(tl.int8)
    else:  # noqa: RET505, only one branch is compiled
        return tl.clamp(ratio, -_E4M3_MOST, _E4M3_MOST, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _scales(largest, most, INT8: tl.constexpr):
    most_code: tl.constexpr = _INT8_MOST if INT8 else _E4M3_MOST
    return tl.maximum(tl.math.div_rn(tl.minimum(largest, most), most_code), _FLOOR)


@triton.jit
def codes_within(x, scale):
    """x / scale in e4m3, for |x| of at most 448 scales, in few instructions. Of an infinite scale, all are NaN.

    The division is Markstein's: a reciprocal that is rounded correctly, and a corrected quotient. It is inexact only
    where the remainder underflows, which is far below the smallest code.
    """
    reciprocal = tl.math.div_rn(1.0, scale)
    ratio = x * reciprocal
    excess = tl.fma(ratio, scale, -x)
    return tl.fma(excess, -reciprocal, ratio).to(
        tl.float8e4nv
    )  # Triton's -x is 0 - x: -excess would lose a zero's sign


@triton.jit
def rounded_row(
    x, scale_ptr, most, INT8: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """x [TILE] float32, a row and zeros behind it -> codes [TILE], and the scale or those of groups [TILE // GROUP].

    GROUP: 0 for one scale. STATIC: the scale is at scale_ptr. most: of absolute values, infinite for no bound. BOUNDED:
    numbers may be larger than `most` or than the static scale allows.
    """
    TILE: tl.constexpr = x.shape[0]
    if STATIC:
        scale = tl.maximum(tl.load(scale_ptr), _FLOOR)
        codes = _codes(x, tl.zeros([TILE], tl.float32) + scale, INT8)
        if GROUP > 0:
            scale += tl.zeros([TILE // GROUP], tl.float32)
        return codes, scale
    else:  # noqa: RET505, only one branch is compiled
        groups: tl.constexpr = TILE // GROUP if GROUP > 0 else 1
        parts = tl.reshape(x, [groups, TILE // groups])
        scales = _scales(tl.max(tl.abs(parts), 1), most, INT8)
        by_number = tl.broadcast_to(scales[:, None], parts.shape)
        codes = _codes(parts, by_number, INT8) if BOUNDED or INT8 else codes_within(parts, by_number)
        if GROUP == 0:
            scales = tl.max(scales, 0)
        return tl.reshape(codes, [TILE]), scales


@triton.jit
def store_rounded(
    x, codes_ptr, scales_ptr, scale_ptr, row, size, scales_stride, most,
    TILE: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Writes `rounded_row` of a row of `size` numbers. scales_stride: of groups."""
    cols = tl.arange(0, TILE)
    codes, scales = rounded_row(x, scale_ptr, most, codes_ptr.dtype.element_ty == tl.int8, GROUP, STATIC, BOUNDED)
    if GROUP > 0:
        group = tl.arange(0, TILE // GROUP)
        tl.store(scales_ptr + row + group * scales_stride, scales, mask=group < tl.cdiv(size, GROUP))
    else:
        tl.store(scales_ptr + row, scales)
    tl.store(codes_ptr + row * size + cols, codes, mask=cols < size)


def allocate(rows: int, size: int, rounding: InputRounding, like: Tensor) -> RoundedRows:
    """Memory of rounded rows [rows, size]. like: has the rows' dtype and device."""
    if rounding.group is None:
        codes_rows, scales = rows, torch.empty((rows,), dtype=torch.float32, device=like.device)
    else:  # the rows behind the last one are read by `torch._scaled_mm`, and what it makes of them by none
        codes_rows, groups = ceil_div(rows, ROWS) * ROWS, ceil_div(size, rounding.group)
        scales = torch.empty((groups, codes_rows), dtype=torch.float32, device=like.device).t()[:rows]
    codes = torch.empty((codes_rows, size), dtype=rounding.dtype, device=like.device)
    return RoundedRows(codes[:rows], scales, like.dtype)


def check_rounding(rounding: InputRounding) -> None:
    """Raises ValueError for what `store_rounded` does not write."""
    if rounding.dtype not in MOST:
        raise ValueError(f"rows are rounded to e4m3 or int8, not to {rounding.dtype}")
    if rounding.group is not None and (rounding.group < 16 or rounding.group & (rounding.group - 1)):
        raise ValueError(f"groups are powers of two from 16 on, not {rounding.group}")


def static_scale(rounding: InputRounding, scales: Tensor) -> Tensor:
    """The scale of the file, or any tensor where there is none."""
    return scales if rounding.scale is None else rounding.scale


def scales_stride(scales: Tensor) -> int:
    """Of groups."""
    return 0 if scales.dim() == 1 else scales.stride(1)


def bound(rounding: InputRounding) -> float:
    return float("inf") if rounding.most is None else rounding.most


def is_bounded(rounding: InputRounding) -> bool:
    """Whether numbers may be larger than the largest code stands for."""
    return rounding.scale is not None or rounding.most is not None


def group_of(rounding: InputRounding) -> int:
    return 0 if rounding.group is None else rounding.group
