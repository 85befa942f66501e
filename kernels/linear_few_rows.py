"""x @ weight.T of one to eight rows: the weight is read once, straight to registers; on a GPU.

With `overlap` (compute capability 9.0) the kernel may start while the one before it ends: it fetches its first weights,
then waits for that kernel, then reads x. Nothing else may be read or written before that wait.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.overlap import options

MOST_ROWS = 8


def linear_few_rows_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


@triton.jit(do_not_specialize=["rows"])
def _linear_few_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    outs,
    size,
    ROWS: tl.constexpr,
    OUT_TILE: tl.constexpr,
    TILE: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # program i has columns i * OUT_TILE ... of the output, all rows
    if OVERLAP:
        gdc_launch_dependents()
    out = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    cols = tl.arange(0, TILE)
    weights = weight_ptr + (out.to(tl.int64) * size)[:, None] + cols[None, :]
    known = (out < outs)[:, None]
    weight = tl.load(weights, mask=known & (cols < size)[None, :], other=0.0)
    if OVERLAP:
        gdc_wait()
    totals = ()  # one a row
    for row in tl.static_range(ROWS):
        x = tl.load(x_ptr + row * size + cols, mask=cols < tl.where(rows > row, size, 0), other=0.0)
        totals += (weight.to(tl.float32) * x.to(tl.float32)[None, :],)  # type: ignore[assignment]
    for start in range(TILE, size, TILE):
        inside = start + cols < size
        weight = tl.load(weights + start, mask=known & inside[None, :], other=0.0)
        sums = ()
        for row in tl.static_range(ROWS):
            x = tl.load(x_ptr + row * size + start + cols, mask=start + cols < tl.where(rows > row, size, 0), other=0.0)
            sums += (totals[row] + weight.to(tl.float32) * x.to(tl.float32)[None, :],)  # type: ignore[assignment]
        totals = sums
    for row in tl.static_range(ROWS):
        y = tl.sum(totals[row], 1)
        if BIAS:
            y += tl.load(bias_ptr + out, mask=out < outs, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * outs + out, y.to(out_ptr.dtype.element_ty), mask=out < tl.where(rows > row, outs, 0))


def linear_few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    out_tile: int,
    tile: int,
    warps: int,
    overlap: bool,
) -> Tensor:
    """x [rows, in] of at most MOST_ROWS rows, weight [out, in], bias [out] -> [rows, out], summed in float32.

    All contiguous and of one dtype. A program has `out_tile` outputs and reads `tile` of each one's weights at a time.
    Raises ValueError for other shapes, dtypes and layouts.
    """
    rows, size = x.shape
    outs = weight.shape[0]
    if rows > MOST_ROWS or weight.shape != (outs, size) or (bias is not None and bias.shape != (outs,)):
        raise ValueError(f"{list(x.shape)} rows do not fit a weight {list(weight.shape)}, or are over {MOST_ROWS}")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        raise ValueError(f"dtypes differ: {x.dtype}, {weight.dtype}")
    if not x.is_contiguous() or not weight.is_contiguous() or (bias is not None and not bias.is_contiguous()):
        raise ValueError(f"rows, weight and bias must be contiguous, got strides {x.stride()}, {weight.stride()}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    _linear_few_rows_kernel[(triton.cdiv(outs, out_tile),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        rows,
        outs,
        size,
        ROWS=triton.next_power_of_2(rows),
        OUT_TILE=out_tile,
        TILE=tile,
        BIAS=bias is not None,
        OVERLAP=overlap,
        num_warps=warps,
        **options(overlap),
    )
    return out
