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
def store_rounded(
    x, codes_ptr, scales_ptr, scale_ptr, row, size, scales_stride, most,
    TILE: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Writes x [TILE] float32, a row of `size` numbers and zeros behind them, as codes and scales of this row.

    GROUP: 0 for one scale. STATIC: the scale is at scale_ptr. scales_stride: of groups. most: of absolute values,
    infinite for no bound.
    """
    INT8: tl.constexpr = codes_ptr.dtype.element_ty == tl.int8
    cols = tl.arange(0, TILE)
    num_groups = tl.cdiv(size, GROUP) if GROUP > 0 else 1
    if STATIC:
        scale = tl.maximum(tl.load(scale_ptr), _FLOOR)
        group = tl.arange(0, TILE // GROUP if GROUP > 0 else 1)
        tl.store(scales_ptr + row + group * scales_stride, scale, mask=group < num_groups)
        codes = _codes(x, tl.zeros([TILE], tl.float32) + scale, INT8)
    elif GROUP == 0:
        scale = _scales(tl.max(tl.abs(x), 0), most, INT8)
        tl.store(scales_ptr + row, scale)
        codes = _codes(x, tl.zeros([TILE], tl.float32) + scale, INT8)
    else:
        groups: tl.constexpr = TILE // GROUP
        parts = tl.reshape(x, [groups, GROUP])
        scales = _scales(tl.max(tl.abs(parts), 1), most, INT8)
        group = tl.arange(0, groups)
        tl.store(scales_ptr + row + group * scales_stride, scales, mask=group < num_groups)
        codes = tl.reshape(_codes(parts, tl.broadcast_to(scales[:, None], [groups, GROUP]), INT8), [TILE])
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


def group_of(rounding: InputRounding) -> int:
    return 0 if rounding.group is None else rounding.group
