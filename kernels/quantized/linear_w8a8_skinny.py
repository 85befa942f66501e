"""Linear layer of one to eight rows with weights and inputs in e4m3 or int8, without tensor cores; on a GPU.

Each weight is read once, straight to registers, as in `layers/linear_skinny`. The rows were rounded before, by the
kernel that made them: each program would repeat that, in two passes. Products of e4m3 are summed in float32, those of
int8 in int32.

With `pdl` (programmatic dependent launch, compute capability 9.0) a program loads its first weights while the kernel
that rounds the rows still runs. It may read and write nothing else before the wait.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.rounding import RoundedRows
from blockyard.kernels.programmatic_launch import pdl_options
from blockyard.kernels.quantized.operands import Weight8Bit, check_operands

MAX_ROWS = 8
LANE = 16  # weights that a thread loads at once; it divides every group


@triton.jit
def load_weights(weights, weight_scales, known, known_scales, start, cols, lanes, size, GROUP: tl.constexpr):
    """A tile of weights from column `start` on, and the scale of each lane if there are groups."""
    weight = tl.load(weights + start, mask=known & (start + cols < size)[None, :], other=0.0)
    if GROUP > 0:
        first = start + lanes
        return weight, tl.load(
            weight_scales + (first // GROUP)[None, :], mask=known_scales & (first < size)[None, :], other=0.0
        )
    else:  # noqa: RET505, only one branch is compiled
        return weight, 0.0


@triton.jit
def _add_tile(
    totals, weight, weight_scale, x_ptr, x_scale_ptr, x_scale_stride, rows, start, cols, lanes, size,
    ROWS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Adds one tile's products to the accumulators of each row. A lane is summed into one accumulator."""
    OUT_TILE: tl.constexpr = weight.shape[0]
    LANES: tl.constexpr = lanes.shape[0]
    LANE_SIZE: tl.constexpr = weight.shape[1] // LANES
    SUM: tl.constexpr = tl.int32 if weight.dtype == tl.int8 else tl.float32
    wide = weight.to(SUM)
    sums = ()
    for row in tl.static_range(ROWS):
        there = tl.where(rows > row, size, 0)
        x = tl.load(x_ptr + row * size + start + cols, mask=start + cols < there, other=0.0).to(SUM)
        products = tl.sum(tl.reshape(wide * x[None, :], [OUT_TILE, LANES, LANE_SIZE]), 2)
        if GROUP > 0:
            first = start + lanes
            x_scale = tl.load(x_scale_ptr + row + first // GROUP * x_scale_stride, mask=first < there, other=0.0)
            products = products.to(tl.float32) * weight_scale * x_scale[None, :]
        sums += (totals[row] + products,)  # type: ignore[assignment]
    return sums


@triton.jit
def _start(
    out_ptr, out, rows, outs,
    ROWS: tl.constexpr, OUT_TILE: tl.constexpr, LANES: tl.constexpr, SUM: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Accumulators, and the output to be added to: tuples with one entry a row."""
    totals = ()
    before = ()
    for row in tl.static_range(ROWS):
        totals += (tl.zeros([OUT_TILE, LANES], SUM),)  # type: ignore[assignment]
        if ADD:
            there = out < tl.where(rows > row, outs, 0)
            before += (tl.load(out_ptr + row * outs + out, mask=there, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return totals, before


@triton.jit(do_not_specialize=["rows", "x_scale_stride"])
def _linear_w8a8_skinny_kernel(
    x_ptr, x_scale_ptr, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr, rows, outs, size, x_scale_stride,
    ROWS: tl.constexpr, OUT_TILE: tl.constexpr, TILE: tl.constexpr, LANE_SIZE: tl.constexpr, EARLY: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program i: outputs i * OUT_TILE ... of all rows; EARLY tiles of weights are loaded before the wait
    if PDL:
        gdc_launch_dependents()
    out = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    cols = tl.arange(0, TILE)
    lanes = tl.arange(0, TILE // LANE_SIZE) * LANE_SIZE
    weights = weight_ptr + (out.to(tl.int64) * size)[:, None] + cols[None, :]
    groups = tl.cdiv(size, GROUP) if GROUP > 0 else 1
    # outputs of one block have one row of scales together
    out_block = tl.program_id(0) * OUT_TILE // BLOCK + tl.arange(0, 1) if BLOCK % OUT_TILE == 0 else out // BLOCK
    weight_scales = weight_scale_ptr + (out_block.to(tl.int64) * groups)[:, None]
    known, known_scales = (out < outs)[:, None], (out_block < tl.cdiv(outs, BLOCK))[:, None]
    early = ()
    scales = ()
    for i in tl.static_range(EARLY):
        weight, scale = load_weights(weights, weight_scales, known, known_scales, i * TILE, cols, lanes, size, GROUP)
        early += (weight,)  # type: ignore[assignment]
        scales += (scale,)  # type: ignore[assignment]
    bias = tl.zeros([OUT_TILE], tl.float32)
    if BIAS:
        bias += tl.load(bias_ptr + out, mask=out < outs, other=0.0).to(tl.float32)
    by_row = tl.zeros([OUT_TILE], tl.float32) + 1.0
    if GROUP == 0:
        by_row = tl.load(weight_scale_ptr + out, mask=out < outs, other=0.0)
    if PDL:
        gdc_wait()
    SUM: tl.constexpr = tl.int32 if weight_ptr.dtype.element_ty == tl.int8 and GROUP == 0 else tl.float32
    totals, before = _start(out_ptr, out, rows, outs, ROWS, OUT_TILE, TILE // LANE_SIZE, SUM, ADD)
    for i in tl.static_range(EARLY):
        totals = _add_tile(
            totals,
            early[i],
            scales[i],
            x_ptr,
            x_scale_ptr,
            x_scale_stride,
            rows,
            i * TILE,
            cols,
            lanes,
            size,
            ROWS,
            GROUP,
        )
    for start in range(EARLY * TILE, size, TILE):
        weight, scale = load_weights(weights, weight_scales, known, known_scales, start, cols, lanes, size, GROUP)
        totals = _add_tile(
            totals, weight, scale, x_ptr, x_scale_ptr, x_scale_stride, rows, start, cols, lanes, size, ROWS, GROUP
        )
    for row in tl.static_range(ROWS):
        y = tl.sum(totals[row], 1).to(tl.float32)
        if GROUP == 0:
            y *= by_row * tl.load(x_scale_ptr + row, mask=rows > row, other=0.0)
        y += bias
        if ADD:
            y += before[row]
        tl.store(out_ptr + row * outs + out, y.to(out_ptr.dtype.element_ty), mask=out < tl.where(rows > row, outs, 0))


def linear_w8a8_skinny(
    x: RoundedRows,
    weight: Weight8Bit,
    bias: Tensor | None,
    *,
    out_tile: int,
    tile: int,
    warps: int,
    pdl: bool,
    early: int = 1,
    add_to: Tensor | None = None,
) -> Tensor:
    """x of at most MAX_ROWS rows [rows, in], weight [out, in], bias [out] -> [rows, out] in the dtype of `x.dtype`.

    add_to [rows, out]: is increased by the product and returned. A program has `out_tile` outputs, loads `tile` weights
    of each at a time, and loads `early` such tiles before it waits for the previous kernel. Raises
    ValueError for other shapes, dtypes and layouts.
    """
    (rows, size), outs = x.codes.shape, weight.codes.shape[0]
    if rows > MAX_ROWS:
        raise ValueError(f"{rows} rows are over {MAX_ROWS}")
    check_operands(x, weight, bias)
    if add_to is not None and (add_to.shape != (rows, outs) or not add_to.is_contiguous() or add_to.dtype != x.dtype):
        raise ValueError(f"{list(add_to.shape)} {add_to.dtype} does not fit {[rows, outs]} {x.dtype}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.codes.device) if add_to is None else add_to
    if out.numel() == 0:
        return out
    _linear_w8a8_skinny_kernel[(ceil_div(outs, out_tile),)](
        x.codes, x.scales, weight.codes, weight.scales, weight.scales if bias is None else bias, out, rows, outs, size,
        0 if weight.group is None else x.scales.stride(1),
        ROWS=next_power_of_2(rows), OUT_TILE=out_tile, TILE=tile, LANE_SIZE=min(LANE, tile),
        EARLY=min(max(early, 1), ceil_div(size, tile)), GROUP=weight.group or 0, BLOCK=weight.block,
        BIAS=bias is not None, ADD=add_to is not None, PDL=pdl, num_warps=warps, **pdl_options(pdl),
    )  # fmt: skip
    return out
