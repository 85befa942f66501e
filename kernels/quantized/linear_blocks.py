"""Linear layer with weights of 4 or 8 bits on tensor cores by stream-K, for steps of few rows; on a GPU.

The work is divided as `layers.linear_stream_k` says, and results are as independent of other rows. The codes of a tile
become numbers in registers, from which tensor cores read the left operand. Sums of a group are multiplied by its scales
in float32, so that no scale is rounded.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace, fits, leave_part, with_bias, with_parts
from blockyard.kernels.programmatic_launch import pdl_options, prefetch
from blockyard.kernels.quantized.block_weights import BLOCK, BlockWeights, dequantized_blocks
from blockyard.kernels.quantized.unpack_assembly import unpack_assembly
from blockyard.kernels.quantized.unpack_tiles import halves, less_zeros, numbers, scale_numbers


def linear_blocks_reference(x: Tensor, weights: BlockWeights, bias: Tensor | None = None) -> Tensor:
    """In float64."""
    out = x.double() @ dequantized_blocks(weights).T
    return out if bias is None else out + bias.double()


@triton.jit
def _load_groups(ptr, step, outs, out, GROUP: tl.constexpr, E8M0: tl.constexpr, WANTED: tl.constexpr):
    """Scales or zeros of a block, one [outputs] in float32 for each group, in the order of inputs.

    They are loaded a step before they are used, because nothing else would hide how long that takes.
    """
    found = ()
    if WANTED:
        COUNT: tl.constexpr = 1 if GROUP % 128 == 0 else 128 // GROUP
        for i in tl.static_range(COUNT):
            group = 0 if GROUP == 0 else step * 128 // GROUP + i
            found += (scale_numbers(tl.load(ptr + group * outs + out), E8M0),)  # type: ignore[assignment]
    return found


@triton.jit
def _add_block(
    total, x_desc, codes_desc, table_ptr, scales, zeros, step, row_start, place,
    SUB: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    WHOLE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Adds the products of BLOCK inputs, SUB inputs of each half at a time. place: of the codes in rows of a block."""
    HALF: tl.constexpr = 64
    DTYPE: tl.constexpr = x_desc.dtype
    PER_HALF: tl.constexpr = 0 if GROUP % 128 == 0 else HALF // GROUP  # groups
    for i in tl.static_range(HALF // SUB):
        start = step * 128 + i * SUB
        if CODES <= 3:
            codes = codes_desc.load([place, i * SUB])
            low, high = halves(codes, table_ptr, CODES, not ZEROS, DTYPE, ASM)
        else:
            low = numbers(codes_desc.load([place, i * SUB]), table_ptr, CODES, not ZEROS, DTYPE)
            high = numbers(codes_desc.load([place, i * SUB + HALF]), table_ptr, CODES, not ZEROS, DTYPE)
        below = x_desc.load([row_start, start])
        above = x_desc.load([row_start, start + HALF])
        if ZEROS:
            low = less_zeros(low, zeros[i * SUB * PER_HALF // HALF], WHOLE)
            high = less_zeros(high, zeros[i * SUB * PER_HALF // HALF + PER_HALF], WHOLE)
        if not SCALES:
            total = tl.dot(low, below.T, total, input_precision="ieee")
            total = tl.dot(high, above.T, total, input_precision="ieee")
        elif PER_HALF == 0:  # both halves are of one group
            part = tl.dot(low, below.T, input_precision="ieee")
            part = tl.dot(high, above.T, part, input_precision="ieee")
            total += part * scales[i * SUB * PER_HALF // HALF][:, None]
        else:
            part = tl.dot(low, below.T, input_precision="ieee")
            total += part * scales[i * SUB * PER_HALF // HALF][:, None]
            part = tl.dot(high, above.T, input_precision="ieee")
            total += part * scales[i * SUB * PER_HALF // HALF + PER_HALF][:, None]
    return total


@triton.jit(do_not_specialize=["rows", "steps"])
def _linear_blocks_kernel(
    x_desc, codes_desc, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, table_ptr, bias_ptr, out_ptr, parts_ptr,
    arrived_ptr, rows, outs, steps,
    OUT_TILE: tl.constexpr, ROW_TILE: tl.constexpr, STAGES: tl.constexpr, SUB: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, E8M0: tl.constexpr, ZEROS: tl.constexpr, WHOLE: tl.constexpr,
    ROW_SCALES: tl.constexpr, ASM: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr, FETCH: tl.constexpr,
):  # fmt: skip
    # program p: steps p * work / programs to (p + 1) * work / programs; a step is a block of inputs
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    row_tiles = tl.cdiv(rows, ROW_TILE)
    work = tl.cdiv(outs, OUT_TILE) * row_tiles * steps
    begin = (program * work // programs).to(tl.int32)
    end = ((program + 1) * work // programs).to(tl.int32)
    place = tl.arange(0, OUT_TILE)[:, None] * ROW_TILE + tl.arange(0, ROW_TILE)[None, :]
    if PDL:
        if FETCH > 0:
            tile = (end - 1) // steps
            WIDTH: tl.constexpr = 64 if CODES <= 3 else 128
            early = tl.maximum(begin - tile * steps, 0) + tl.arange(0, FETCH)  # blocks
            line = tile // row_tiles * OUT_TILE * WIDTH + tl.arange(0, OUT_TILE * WIDTH // 128) * 128
            ahead = (tl.minimum(early, steps - 1).to(tl.int64) * outs * WIDTH)[:, None] + line[None, :]
            prefetch(codes_ptr + tl.minimum(ahead, steps.to(tl.int64) * outs * WIDTH - 1))
        gdc_wait()
    while end > begin:
        tile = (end - 1) // steps
        first = tl.maximum(begin - tile * steps, 0)
        last = end - tile * steps
        out_start = tile // row_tiles * OUT_TILE
        row_start = tile % row_tiles * ROW_TILE
        out = tl.minimum(out_start + tl.arange(0, OUT_TILE), outs - 1)
        total = tl.zeros([OUT_TILE, ROW_TILE], tl.float32)
        scales = _load_groups(scales_ptr, first, outs, out, GROUP, E8M0, SCALES)
        zeros = _load_groups(zeros_ptr, first, outs, out, GROUP, False, ZEROS)
        for step in tl.range(first, last, num_stages=STAGES):
            following = tl.minimum(step + 1, last - 1)
            next_scales = _load_groups(scales_ptr, following, outs, out, GROUP, E8M0, SCALES)
            next_zeros = _load_groups(zeros_ptr, following, outs, out, GROUP, False, ZEROS)
            total = _add_block(
                total, x_desc, codes_desc, table_ptr, scales, zeros, step, row_start, step * outs + out_start,
                SUB, CODES, GROUP, SCALES, ZEROS, WHOLE, ASM,
            )  # fmt: skip
            scales, zeros = next_scales, next_zeros
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
            if ROW_SCALES:
                total *= tl.load(row_scales_ptr + out).to(tl.float32)[:, None]
            out = out_start + tl.arange(0, OUT_TILE)
            row = row_start + tl.arange(0, ROW_TILE)
            total = with_bias(total, bias_ptr + out, out < outs, BIAS)
            inside = (out < outs)[:, None] & (row < rows)[None, :]
            where = out_ptr + row.to(tl.int64)[None, :] * outs + out[:, None]
            tl.store(where, total.to(out_ptr.dtype.element_ty), mask=inside)


def linear_blocks(
    x: Tensor,
    weights: BlockWeights,
    bias: Tensor | None,
    tiling: Tiling,
    workspace: Workspace,
    split: int,
    programs: int = 0,
    table: Tensor | None = None,
) -> Tensor:
    """x [rows, in], bias [out] -> [rows, out], accumulated in float32.

    tiling: its `in_tile` is BLOCK. table: that of the weights on the device, which is needed where there are no
    instructions for it, in float32. Otherwise as `linear_stream_k`.
    """
    rows, size = x.shape
    outs = weights.outputs
    if size != weights.inputs or (bias is not None and bias.shape != (outs,)) or tiling.in_tile != BLOCK:
        raise ValueError(f"rows {list(x.shape)} do not fit a weight [{outs}, {weights.inputs}] in blocks of {BLOCK}")
    if not fits(x) or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(
            f"rows must be contiguous, aligned and of the bias' dtype, got strides {x.stride()}, {x.dtype}"
        )
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    parts = max(split, 1) * ceil_div(outs, tiling.out_tile)  # of one tile of rows
    most = workspace.rows_at_once(tiling, rows, parts, programs) if split > 1 or programs else rows
    sub = weights.group if 0 < weights.group < BLOCK // 2 else BLOCK // 2
    assembly = unpack_assembly(weights.kind, x.dtype, weights.zeros is None, weights.table) if x.is_cuda else ""
    codes, nothing = weights.codes, weights.codes
    codes_desc = TensorDescriptor.from_tensor(codes.view(-1, codes.shape[2]), [tiling.out_tile, sub])
    is_whole = weights.zeros is not None and not weights.zeros.is_floating_point()
    for start in range(0, rows, most):
        some, result = x[start : start + most], out[start : start + most]
        grid = programs or parts * ceil_div(len(some), tiling.row_tile)
        _linear_blocks_kernel[(grid,)](
            TensorDescriptor.from_tensor(some, [tiling.row_tile, sub]), codes_desc, codes,
            nothing if weights.scales is None else weights.scales, nothing if weights.zeros is None else weights.zeros,
            nothing if weights.row_scales is None else weights.row_scales, nothing if table is None else table,
            nothing if bias is None else bias, result, workspace.parts, workspace.arrived,
            len(some), outs, ceil_div(size, BLOCK),
            OUT_TILE=tiling.out_tile, ROW_TILE=tiling.row_tile, STAGES=tiling.stages, SUB=sub, CODES=int(weights.kind),
            GROUP=weights.group, SCALES=weights.scales is not None, E8M0=weights.is_e8m0,
            ZEROS=weights.zeros is not None, WHOLE=is_whole, ROW_SCALES=weights.row_scales is not None, ASM=assembly,
            BIAS=bias is not None, PDL=tiling.pdl, FETCH=tiling.fetch, num_warps=tiling.warps,
            num_stages=tiling.stages, **pdl_options(tiling.pdl),
        )  # fmt: skip
    return out
