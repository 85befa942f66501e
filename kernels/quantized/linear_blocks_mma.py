"""Linear layer of one to 16 rows with weights of 4 bits, in Gluon: codes go from memory straight to the registers from
which tensor cores read the left operand; on a GPU.

After Marlin (https://arxiv.org/abs/2408.11743), without its order of codes: a thread holds the 8 adjacent inputs whose
codes it has loaded, in both operands alike, because a sum does not depend on the order of its terms. The warps of a
program take the blocks of inputs in turn and add their sums at the end, so that small matrices too keep all
multiprocessors loading. Nothing but that last sum is in shared memory, and no step waits for another warp.

Zeros are subtracted from sums in float32, times the sums of the inputs, which tensor cores make with a left operand of
ones: it takes fewer instructions than to subtract them from each code, and rounds nothing. So does OFFSET, by which
numbers made of such integers are too great.

A row of x is one column of the right operand: its sum has the same terms in the same order beside any other rows.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.programmatic_launch import pdl_options
from blockyard.kernels.quantized.block_weights import BLOCK, BlockWeights
from blockyard.kernels.quantized.packed_weights import Codes
from blockyard.kernels.quantized.unpack_assembly import OFFSET, unpack_assembly
from blockyard.kernels.quantized.unpack_tiles import scale_numbers

MAX_ROWS = 16
HALF = 64  # bytes of the codes of one output in a block, and inputs of each half


@gluon.jit
def _load_groups(
    ptr, block, out, known, outs,
    FIRST: gl.constexpr, SUB: gl.constexpr, GROUP: gl.constexpr, E8M0: gl.constexpr,
):  # fmt: skip
    """Scales or zeros of each SUB inputs of half a block from input FIRST on, or one for all: float32, of the shape of
    `block` and `out`."""
    found = ()
    COUNT: gl.constexpr = 1 if GROUP % 128 == 0 else 64 // SUB
    for i in gl.static_range(COUNT):
        group = block * 0 if GROUP == 0 else (block * 128 + FIRST + i * SUB) // GROUP
        scale = gl.load(ptr + group * outs + out, mask=known, other=0.0)
        found = found + (scale_numbers(scale, E8M0),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def _load_step(
    codes_ptr, scales_ptr, zeros_ptr, step, blocks, outs, out_start,
    C: gl.constexpr, WARPS: gl.constexpr, OUT_TILE: gl.constexpr, SUB: gl.constexpr, GROUP: gl.constexpr,
    SCALES: gl.constexpr, E8M0: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """What is read of a weight for one step, in which each warp has a block of inputs: codes in pieces of SUB bytes,
    scales and zeros as rows of the result."""
    A: gl.constexpr = gl.DotOperandLayout(0, C, SUB // 8)
    OUTS_A: gl.constexpr = gl.SliceLayout(2, A)
    warp = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, OUTS_A)), 1)
    block = step * WARPS + warp
    out = out_start + gl.expand_dims(gl.arange(0, OUT_TILE, gl.SliceLayout(0, OUTS_A)), 0)
    known = (block < blocks) & (out < outs)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, SUB, gl.SliceLayout(0, gl.SliceLayout(1, A))), 0), 1)
    place = gl.expand_dims((block * outs + out) * 64, 2) + k
    codes = ()
    for i in gl.static_range(64 // SUB):
        tile = gl.load(codes_ptr + place + i * SUB, mask=gl.expand_dims(known, 2), other=0)
        codes = codes + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    OUTS_C: gl.constexpr = gl.SliceLayout(2, C)
    row_block = step * WARPS + gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, OUTS_C)), 1)
    row = out_start + gl.expand_dims(gl.arange(0, OUT_TILE, gl.SliceLayout(0, OUTS_C)), 0)
    inside = (row_block < blocks) & (row < outs)
    zeros = ()
    if ZEROS:
        zeros = _load_groups(zeros_ptr, row_block, row, inside, outs, 0, SUB, GROUP, False)
        if GROUP % 128 != 0:
            zeros = zeros + _load_groups(zeros_ptr, row_block, row, inside, outs, 64, SUB, GROUP, False)
    scales = ()
    if SCALES:
        scales = _load_groups(scales_ptr, row_block, row, inside, outs, 0, SUB, GROUP, E8M0)
        if GROUP % 128 != 0:
            scales = scales + _load_groups(scales_ptr, row_block, row, inside, outs, 64, SUB, GROUP, E8M0)
    return codes, scales, zeros


@gluon.jit
def _load_steps(
    codes_ptr, scales_ptr, zeros_ptr, first, blocks, outs, out_start,
    COUNT: gl.constexpr, C: gl.constexpr, WARPS: gl.constexpr, OUT_TILE: gl.constexpr, SUB: gl.constexpr,
    GROUP: gl.constexpr, SCALES: gl.constexpr, E8M0: gl.constexpr, ZEROS: gl.constexpr,
):  # fmt: skip
    """COUNT steps from `first` on, all of which are on their way at a time."""
    steps = ()
    for i in gl.static_range(COUNT):
        one = _load_step(
            codes_ptr, scales_ptr, zeros_ptr, first + i, blocks, outs, out_start,
            C, WARPS, OUT_TILE, SUB, GROUP, SCALES, E8M0, ZEROS,
        )  # fmt: skip
        steps = steps + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return steps


@gluon.jit
def _load_x(
    x_ptr, step, rows, size, START: gl.constexpr,
    C: gl.constexpr, WARPS: gl.constexpr, ROW_TILE: gl.constexpr, SUB: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """SUB inputs of each warp's block from its input START on, as the right operand [WARPS, SUB, ROW_TILE]; 0 behind
    the inputs. Rows that do not exist are the last one."""
    B: gl.constexpr = gl.DotOperandLayout(1, C, SUB // 8)
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, B))), 1), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, SUB, gl.SliceLayout(0, gl.SliceLayout(2, B))), 0), 2)
    row = gl.expand_dims(gl.expand_dims(gl.arange(0, ROW_TILE, gl.SliceLayout(0, gl.SliceLayout(1, B))), 0), 1)
    col = (step * WARPS + warp) * 128 + START + k
    place = gl.minimum(row, rows - 1) * size + col
    if EVEN:
        return gl.load(x_ptr + place)
    else:  # noqa: RET505, only one branch is compiled
        return gl.load(x_ptr + place, mask=col < size, other=0.0)


@gluon.jit
def _halves(codes, DTYPE: gl.constexpr, ASM: gl.constexpr):
    """The numbers of the lower and of the upper halves of bytes."""
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [codes], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=4
        )
    else:  # noqa: RET505, only one branch is compiled
        return gl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [codes], dtype=(gl.float16, gl.float16), is_pure=True, pack=4
        )


@gluon.jit
def _sums_of_inputs(like, x, total, WANTED: gl.constexpr):
    """Adds the sums of inputs of each row, once for each output. like: the left operand of their products."""
    return mma_v2(gl.full_like(like, 1.0), x, total) if WANTED else total


@gluon.jit
def _scaled(
    part, inputs, scales, zeros, NUMBER: gl.constexpr, SCALES: gl.constexpr, ZEROS: gl.constexpr, OFFSET: gl.constexpr
):
    """Sums of the group NUMBER, less its zero and OFFSET times the sums of its inputs, times its scale."""
    if ZEROS:
        part -= inputs * gl.expand_dims(zeros[NUMBER] + OFFSET, 2)
    if SCALES:
        part *= gl.expand_dims(scales[NUMBER], 2)
    return part


@gluon.jit
def _add_step(
    total, tiles, x_ptr, step, rows, size,
    C: gl.constexpr, WARPS: gl.constexpr, ROW_TILE: gl.constexpr, SUB: gl.constexpr, GROUP: gl.constexpr,
    SCALES: gl.constexpr, ZEROS: gl.constexpr, OFFSET: gl.constexpr, EVEN: gl.constexpr, ASM: gl.constexpr,
):  # fmt: skip
    """Adds one step's products to total [WARPS, OUT_TILE, ROW_TILE] in float32."""
    codes, scales, zeros = tiles
    DTYPE: gl.constexpr = x_ptr.dtype.element_ty
    PIECES: gl.constexpr = 64 // SUB
    WHOLE_BLOCK: gl.constexpr = GROUP % 128 == 0
    part = gl.zeros_like(total)
    inputs = gl.zeros_like(total)
    for i in gl.static_range(PIECES):
        low, high = _halves(codes[i], DTYPE, ASM)
        below = _load_x(x_ptr, step, rows, size, i * SUB, C, WARPS, ROW_TILE, SUB, EVEN)
        above = _load_x(x_ptr, step, rows, size, 64 + i * SUB, C, WARPS, ROW_TILE, SUB, EVEN)
        if not WHOLE_BLOCK:
            part = mma_v2(low, below, gl.zeros_like(total))
            inputs = _sums_of_inputs(low, below, gl.zeros_like(total), ZEROS)
            total += _scaled(part, inputs, scales, zeros, i, SCALES, ZEROS, OFFSET)
            part = mma_v2(high, above, gl.zeros_like(total))
            inputs = _sums_of_inputs(high, above, gl.zeros_like(total), ZEROS)
            total += _scaled(part, inputs, scales, zeros, PIECES + i, SCALES, ZEROS, OFFSET)
        elif SCALES or ZEROS:
            part = mma_v2(low, below, part)
            part = mma_v2(high, above, part)
            inputs = _sums_of_inputs(low, below, inputs, ZEROS)
            inputs = _sums_of_inputs(high, above, inputs, ZEROS)
        else:
            total = mma_v2(low, below, total)
            total = mma_v2(high, above, total)
    if WHOLE_BLOCK and (SCALES or ZEROS):
        total += _scaled(part, inputs, scales, zeros, 0, SCALES, ZEROS, OFFSET)
    return total


@gluon.jit(do_not_specialize=["rows", "blocks"])
def _linear_blocks_mma_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, bias_ptr, out_ptr, rows, outs, size, blocks,
    OUT_TILE: gl.constexpr, ROW_TILE: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr, SUB: gl.constexpr,
    GROUP: gl.constexpr, SCALES: gl.constexpr, E8M0: gl.constexpr, ZEROS: gl.constexpr, OFFSET: gl.constexpr,
    ROW_SCALES: gl.constexpr, EVEN: gl.constexpr, ASM: gl.constexpr, BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # program i: outputs i * OUT_TILE ... of all rows; AHEAD steps of weights are loaded before the wait, and as many at
    # a time behind it. No codes are carried around the loop: bytes would then have a register each
    if PDL:
        gdc_launch_dependents()
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    out_start = gl.program_id(0) * OUT_TILE
    tiles = _load_steps(
        codes_ptr, scales_ptr, zeros_ptr, 0, blocks, outs, out_start,
        AHEAD, C, WARPS, OUT_TILE, SUB, GROUP, SCALES, E8M0, ZEROS,
    )  # fmt: skip
    if PDL:
        gdc_wait()
    total = gl.zeros([WARPS, OUT_TILE, ROW_TILE], gl.float32, C)
    for i in gl.static_range(AHEAD):
        total = _add_step(
            total, tiles[i], x_ptr, i, rows, size,
            C, WARPS, ROW_TILE, SUB, GROUP, SCALES, ZEROS, OFFSET, EVEN, ASM,
        )  # fmt: skip
    for first in range(AHEAD, (blocks + WARPS - 1) // WARPS, AHEAD):
        tiles = _load_steps(
            codes_ptr, scales_ptr, zeros_ptr, first, blocks, outs, out_start,
            AHEAD, C, WARPS, OUT_TILE, SUB, GROUP, SCALES, E8M0, ZEROS,
        )  # fmt: skip
        for i in gl.static_range(AHEAD):
            total = _add_step(
                total, tiles[i], x_ptr, first + i, rows, size,
                C, WARPS, ROW_TILE, SUB, GROUP, SCALES, ZEROS, OFFSET, EVEN, ASM,
            )  # fmt: skip
    y = gl.sum(total, 0)  # in the layout of a slice of C
    S: gl.constexpr = gl.SliceLayout(0, C)
    out = out_start + gl.arange(0, OUT_TILE, gl.SliceLayout(1, S))
    known = out < outs
    if ROW_SCALES:
        y *= gl.expand_dims(gl.load(row_scales_ptr + out, mask=known, other=0.0).to(gl.float32), 1)
    if BIAS:
        y += gl.expand_dims(gl.load(bias_ptr + out, mask=known, other=0.0).to(gl.float32), 1)
    row = gl.arange(0, ROW_TILE, gl.SliceLayout(0, S))
    inside = gl.expand_dims(known, 1) & gl.expand_dims(row < rows, 0)
    place = gl.expand_dims(row, 0) * outs + gl.expand_dims(out, 1)
    gl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=inside)


def can_multiply(weights: BlockWeights, dtype: torch.dtype) -> bool:
    """Whether `linear_blocks_mma` takes these weights with rows of this dtype."""
    return weights.is_4bit and unpack_assembly(weights.kind, dtype, weights.zeros is None, weights.table) != ""


def mma_row_tile(rows: int) -> int:
    """The rows of a tile, for which a kernel is compiled."""
    return 8 if rows <= 8 else MAX_ROWS


def is_even(inputs: int, warps: int, ahead: int) -> bool:
    """Whether the inputs fill all warps in all steps, so that none are behind them: another kernel is compiled."""
    return inputs % (BLOCK * warps * ahead) == 0


def linear_blocks_mma(
    x: Tensor, weights: BlockWeights, bias: Tensor | None, *, out_tile: int, warps: int, ahead: int, pdl: bool
) -> Tensor:
    """x [rows, in] of at most MAX_ROWS rows, bias [out] -> [rows, out], accumulated in float32.

    A program has `out_tile` outputs, a multiple of 16, and `ahead` blocks of each of its `warps` on their way. Raises
    ValueError for other shapes, dtypes and layouts.
    """
    (rows, size), outs = x.shape, weights.outputs
    if rows > MAX_ROWS or size != weights.inputs or (bias is not None and bias.shape != (outs,)):
        raise ValueError(f"rows {list(x.shape)} do not fit a weight [{outs}, {weights.inputs}], or are over {MAX_ROWS}")
    if not x.is_contiguous() or not can_multiply(weights, x.dtype) or (bias is not None and bias.dtype != x.dtype):
        raise ValueError(f"rows must be contiguous, of 16 bits and of the bias' dtype, got {x.dtype} {x.stride()}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    codes, scales, zeros, row_scales = weights.codes, weights.scales, weights.zeros, weights.row_scales
    offset = OFFSET[x.dtype] if zeros is not None and weights.kind is Codes.INT4 else 0
    _linear_blocks_mma_kernel[(ceil_div(outs, out_tile),)](
        x, codes, codes if scales is None else scales, codes if zeros is None else zeros,
        codes if row_scales is None else row_scales, codes if bias is None else bias, out, rows, outs, size,
        len(codes), OUT_TILE=out_tile, ROW_TILE=mma_row_tile(rows), WARPS=warps, AHEAD=ahead,
        SUB=weights.group if 0 < weights.group < HALF else HALF, GROUP=weights.group, SCALES=scales is not None,
        E8M0=weights.is_e8m0, ZEROS=zeros is not None, OFFSET=offset, ROW_SCALES=row_scales is not None,
        EVEN=is_even(size, warps, ahead),
        ASM=unpack_assembly(weights.kind, x.dtype, zeros is None, weights.table, has_offset=offset > 0),
        BIAS=bias is not None, PDL=pdl, num_warps=warps, **pdl_options(pdl),
    )  # fmt: skip
    return out
