"""Linear layer on tensor cores with weights and inputs in e4m3 or int8, by stream-K; on a GPU.

As `layers/linear_stream_k`, whose docstring says how sums are divided and why a row does not depend on the others.
Products of e4m3 are summed in float32: the tensor cores keep fewer bits, so that after every 128 inputs their sum is
added to one in float32 registers. There the scales of groups are applied, those of whole rows at the end. Sums of int8
are exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace, fits, leave_part, with_bias, with_parts
from blockyard.kernels.layers.rounding import RoundedRows
from blockyard.kernels.programmatic_launch import pdl_options, prefetch
from blockyard.kernels.quantized.operands import Weight8Bit, check_operands


@triton.jit
def _load_scales(
    by_out, by_row, column, x_scale_stride, known_outs, known_rows,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, OUT_TILE: tl.constexpr,
):  # fmt: skip
    """The scales of outputs and rows at this column; where outputs have one together, rows have the product."""
    if GROUP == 0:
        return 1.0, 1.0
    else:  # noqa: RET505, only one branch is compiled
        group = column // GROUP
        of_rows = tl.load(by_row + group * x_scale_stride, mask=known_rows, other=0.0)
        if BLOCK % OUT_TILE == 0:
            return 1.0, of_rows * tl.load(by_out + group)
        else:  # noqa: RET505
            return tl.load(by_out + group, mask=known_outs, other=0.0), of_rows


@triton.jit
def _sum_steps(
    x_desc, by_row, weight_desc, weight_scale_ptr, out_start, row_start, first, last, rows, outs, size, x_scale_stride,
    OUT_TILE: tl.constexpr, ROW_TILE: tl.constexpr, IN_TILE: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """The sum [OUT_TILE, ROW_TILE] of steps from `first` to `last`, without the scales of whole rows.

    by_row: pointers to the scales of the tile's rows.
    """
    out, row = out_start + tl.arange(0, OUT_TILE), row_start + tl.arange(0, ROW_TILE)
    groups = tl.cdiv(size, GROUP) if GROUP > 0 else 1
    total = tl.zeros([OUT_TILE, ROW_TILE], tl.int32 if INT8 and GROUP == 0 else tl.float32)
    out_block = out_start // BLOCK if BLOCK % OUT_TILE == 0 else out // BLOCK
    by_out = weight_scale_ptr + out_block.to(tl.int64) * groups
    of_outs, of_rows = _load_scales(
        by_out, by_row, first * IN_TILE, x_scale_stride, out < outs, row < rows, GROUP, BLOCK, OUT_TILE
    )
    for step in tl.range(first, last, num_stages=STAGES):
        weight = weight_desc.load([out_start, step * IN_TILE])
        x = x_desc.load([row_start, step * IN_TILE])
        if GROUP > 0:
            # of the next step, because tensor cores would wait for them
            column = tl.minimum(step + 1, last - 1) * IN_TILE
            next_outs, next_rows = _load_scales(
                by_out, by_row, column, x_scale_stride, out < outs, row < rows, GROUP, BLOCK, OUT_TILE
            )
            if BLOCK % OUT_TILE == 0:
                total += tl.dot(weight, x.T).to(tl.float32) * of_rows[None, :]
            else:
                total += tl.dot(weight, x.T).to(tl.float32) * (of_outs[:, None] * of_rows[None, :])
                of_outs = next_outs
            of_rows = next_rows
        elif INT8:
            total = tl.dot(weight, x.T, total, out_dtype=tl.int32)
        else:
            total = tl.dot(weight, x.T, total, max_num_imprecise_acc=min(IN_TILE, 128))
    return total


@triton.jit(do_not_specialize=["rows", "x_scale_stride"])
def _linear_w8a8_stream_k_kernel(
    x_desc, x_scale_ptr, weight_desc, weight_ptr, weight_scale_ptr, bias_ptr, out_ptr, parts_ptr, arrived_ptr,
    rows, outs, size, x_scale_stride,
    OUT_TILE: tl.constexpr, ROW_TILE: tl.constexpr, IN_TILE: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
    BLOCK: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    # program p: steps p * work / programs to (p + 1) * work / programs
    INT8: tl.constexpr = weight_ptr.dtype.element_ty == tl.int8
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    row_tiles = tl.cdiv(rows, ROW_TILE)
    steps = tl.cdiv(size, IN_TILE)
    work = tl.cdiv(outs, OUT_TILE) * row_tiles * steps
    begin = (program * work // programs).to(tl.int32)
    end = ((program + 1) * work // programs).to(tl.int32)
    place = tl.arange(0, OUT_TILE)[:, None] * ROW_TILE + tl.arange(0, ROW_TILE)[None, :]
    if PDL:
        if FETCH > 0:
            tile = (end - 1) // steps
            lines = tl.maximum(begin - tile * steps, 0) * IN_TILE + tl.arange(0, FETCH) * 128
            early = tl.minimum(tile // row_tiles * OUT_TILE + tl.arange(0, OUT_TILE), outs - 1).to(tl.int64)
            prefetch(weight_ptr + (early * size)[:, None] + tl.minimum(lines, size - 1)[None, :])
        gdc_wait()
    while end > begin:
        tile = (end - 1) // steps
        first = tl.maximum(begin - tile * steps, 0)
        last = end - tile * steps
        out_start = tile // row_tiles * OUT_TILE
        row_start = tile % row_tiles * ROW_TILE
        out = out_start + tl.arange(0, OUT_TILE)
        row = row_start + tl.arange(0, ROW_TILE)
        total = _sum_steps(
            x_desc, x_scale_ptr + row, weight_desc, weight_scale_ptr, out_start, row_start, first, last, rows, outs,
            size, x_scale_stride, OUT_TILE, ROW_TILE, IN_TILE, STAGES, GROUP, BLOCK, INT8,
        )  # fmt: skip
        end = tile * steps + first
        if PDL:  # noqa: SIM102, PDL is known at compile time
            if end <= begin:
                gdc_launch_dependents()
        if last < steps:
            leave_part(total, program, parts_ptr, arrived_ptr, place)
        else:
            if first > 0:
                other = ((tile.to(tl.int64) * steps + 1) * programs - 1) // work  # the program of the tile's first step
                total = with_parts(total, other, program, parts_ptr, arrived_ptr, place)
            y = total.to(tl.float32)
            if GROUP == 0:
                y *= tl.load(weight_scale_ptr + out, mask=out < outs, other=0.0)[:, None]
                y *= tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)[None, :]
            y = with_bias(y, bias_ptr + out, out < outs, BIAS)
            inside = (out < outs)[:, None] & (row < rows)[None, :]
            where = out_ptr + row.to(tl.int64)[None, :] * outs + out[:, None]
            tl.store(where, y.to(out_ptr.dtype.element_ty), mask=inside)


def linear_w8a8_stream_k(
    x: RoundedRows,
    weight: Weight8Bit,
    bias: Tensor | None,
    tiling: Tiling,
    workspace: Workspace | None = None,
    split: int = 1,
) -> Tensor:
    """x [rows, in], weight [out, in], bias [out] -> [rows, out] in the dtype of `x.dtype`.

    Every tile is cut into `split` parts, which leave sums in the workspace; without one, into one part. Rows for which
    it has no room are computed by further launches, which does not change their results. A step of `in_tile` inputs
    lies in one group. Operands are as `check_operands` says, and rows of codes are multiples of 16 bytes. Raises
    ValueError for other layouts, shapes and dtypes.
    """
    check_operands(x, weight, bias)
    (rows, size), outs, group = x.codes.shape, weight.codes.shape[0], weight.group or 0
    if not fits(x.codes) or not fits(weight.codes):
        raise ValueError(f"rows must be aligned, got {size} inputs")
    if group % tiling.in_tile:
        raise ValueError(f"steps of {tiling.in_tile} inputs do not divide groups of {group}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.codes.device)
    if out.numel() == 0:
        return out
    parts, most = max(split, 1) * ceil_div(outs, tiling.out_tile), rows  # of one tile of rows
    if split > 1:
        if workspace is None:
            raise ValueError(f"{split} parts of a tile need a workspace")
        most = workspace.rows_at_once(tiling, rows, parts)
    # without a workspace any memory, which is not used; parts have the dtype of the sum in any case
    sums = weight.scales if workspace is None else workspace.parts
    arrived = weight.scales.view(torch.int32) if workspace is None else workspace.arrived
    if weight.codes.dtype == torch.int8 and not group:
        sums = sums.view(torch.int32)
    weights = TensorDescriptor.from_tensor(weight.codes, [tiling.out_tile, tiling.in_tile])
    for start in range(0, rows, most):
        codes, scales, result = (one[start : start + most] for one in (x.codes, x.scales, out))
        grid = parts * ceil_div(len(codes), tiling.row_tile)
        _linear_w8a8_stream_k_kernel[(grid,)](
            TensorDescriptor.from_tensor(codes, [tiling.row_tile, tiling.in_tile]), scales, weights, weight.codes,
            weight.scales, weight.scales if bias is None else bias, result, sums, arrived, len(codes), outs, size,
            0 if group == 0 else scales.stride(1),
            OUT_TILE=tiling.out_tile, ROW_TILE=tiling.row_tile, IN_TILE=tiling.in_tile, STAGES=tiling.stages,
            GROUP=group, BLOCK=weight.block, BIAS=bias is not None, PDL=tiling.pdl, FETCH=tiling.fetch,
            num_warps=tiling.warps, num_stages=tiling.stages, **pdl_options(tiling.pdl),
        )  # fmt: skip
    return out
