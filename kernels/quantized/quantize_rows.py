"""Rounds rows to codes of 8 bits with their scales, for products with inputs in e4m3 or int8; on a GPU."""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import next_power_of_2
from blockyard.kernels.layers.round_row import (
    allocate,
    bound,
    check_rounding,
    group_of,
    is_bounded,
    scales_stride,
    static_scale,
    store_rounded,
)
from blockyard.kernels.layers.rounding import InputRounding, RoundedRows, round_rows_reference
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

LONGEST_ROW = 65536  # numbers; a program holds a whole row

quantize_rows_reference = round_rows_reference


@triton.jit(do_not_specialize=["scales_stride"])
def _quantize_rows_kernel(
    x_ptr, codes_ptr, scales_ptr, scale_ptr, stride, size, scales_stride, most,
    TILE: tl.constexpr, GROUP: tl.constexpr, STATIC: tl.constexpr, BOUNDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program i: row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, TILE)
    x = tl.load(x_ptr + row * stride + cols, mask=cols < size, other=0.0).to(tl.float32)
    store_rounded(x, codes_ptr, scales_ptr, scale_ptr, row, size, scales_stride, most, TILE, GROUP, STATIC, BOUNDED)


def quantize_rows(x: Tensor, rounding: InputRounding) -> RoundedRows:
    """x [rows, size] -> codes [rows, size] and scales float32 [rows] or [rows, groups], with the bits of the reference.

    Rows may be strided. Raises ValueError for other layouts, rows over LONGEST_ROW and groups that are no power of two.
    """
    check_rounding(rounding)
    if x.dim() != 2 or x.stride(1) != 1 or x.shape[1] > LONGEST_ROW:
        raise ValueError(f"expected rows of at most {LONGEST_ROW} contiguous numbers, got {list(x.shape)} {x.stride()}")
    rows, size = x.shape
    out = allocate(rows, size, rounding, x)
    if out.codes.numel():
        tile, pdl = max(next_power_of_2(size), group_of(rounding), 16), supports_pdl(x.device)
        _quantize_rows_kernel[(rows,)](
            x, out.codes, out.scales, static_scale(rounding, out.scales), x.stride(0), size,
            scales_stride(out.scales), bound(rounding),
            TILE=tile, GROUP=group_of(rounding), STATIC=rounding.scale is not None, BOUNDED=is_bounded(rounding),
            PDL=pdl, num_warps=min(max(tile // 512, 1), 16), **pdl_options(pdl),
        )  # fmt: skip
    return out
