"""Linear layer of one to eight rows with weights of 4 or 8 bits, without tensor cores: each code is read once, straight
to registers; on a GPU.

As `layers.linear_skinny`, which says what is fused and what `pdl` does. Products of the codes that a thread loads at
once are summed in float32, and each sum is multiplied by the scale of its group.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.linear_skinny import MAX_ROWS, linear_skinny_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.programmatic_launch import pdl_options
from blockyard.kernels.quantized.block_weights import BLOCK, BlockWeights, dequantized_blocks
from blockyard.kernels.quantized.unpack_tiles import numbers, scale_numbers


def linear_blocks_skinny_reference(
    x: Tensor,
    weights: BlockWeights,
    bias: Tensor | None = None,
    norm: RMSNorm | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
) -> Tensor:
    """In float64."""
    own = None if norm is None else RMSNorm(norm.weight.double(), norm.eps)
    wide = [None if one is None else one.double() for one in (bias, add_to)]
    return linear_skinny_reference(x.double(), dequantized_blocks(weights), wide[0], own, gated, wide[1])


@triton.jit
def _load_groups(
    ptr, block, out, known, outs,
    HALF: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    """Scales or zeros of blocks [BLOCKS] and outputs [OUT_TILE] in float32: of each block [BLOCKS, OUT_TILE, 1], of
    each lane of a half [BLOCKS, OUT_TILE, LANES], or of each output [1, OUT_TILE, 1]."""
    if GROUP == 0:
        return scale_numbers(tl.load(ptr + out, mask=known, other=0.0), E8M0)[None, :, None]
    else:  # noqa: RET505, only one branch is compiled
        if GROUP % 128 == 0:
            group = (block * 128 // GROUP)[:, None, None]
        else:
            lane = (HALF * WIDTH + tl.arange(0, WIDTH // 16) * 16) // GROUP
            group = (block * (128 // GROUP))[:, None, None] + lane[None, None, :]
        scale = tl.load(ptr + group * outs + out[None, :, None], mask=known[None, :, None], other=0.0)
        return scale_numbers(scale, E8M0)


@triton.jit
def _load_tile(
    codes_ptr, scales_ptr, zeros_ptr, norm_weight_ptr, first, place, out, known, outs,
    BLOCKS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, E8M0: tl.constexpr,
    ZEROS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """What is read of BLOCKS blocks of a weight, from block `first` on: codes [BLOCKS, OUT_TILE, WIDTH], and for each
    half of a block scales, zeros and the norm's weight. 8-bit codes have one half, which is all of a block."""
    WIDTH: tl.constexpr = 64 if CODES <= 3 else 128  # bytes of a block of one output
    HALVES: tl.constexpr = 128 // WIDTH
    block = first + tl.arange(0, BLOCKS)
    begin = tl.cast(first, tl.int64) * outs * WIDTH
    codes = tl.load(codes_ptr + begin + place, mask=known[None, :, None], other=0.0)
    scales = ()
    zeros = ()
    norms = ()
    for half in tl.static_range(HALVES):
        if SCALES and (half == 0 or GROUP % 128 > 0):
            scales += (_load_groups(scales_ptr, block, out, known, outs, half, WIDTH, GROUP, E8M0),)  # type: ignore[assignment]
        if ZEROS and (half == 0 or GROUP % 128 > 0):
            zeros += (_load_groups(zeros_ptr, block, out, known, outs, half, WIDTH, GROUP, False),)  # type: ignore[assignment]
        if NORM:
            col = block[:, None] * 128 + half * WIDTH + tl.arange(0, WIDTH)[None, :]
            norms += (tl.load(norm_weight_ptr + col),)  # type: ignore[assignment]
    return codes, scales, zeros, norms


@triton.jit
def _load_tiles(
    codes_ptr, scales_ptr, zeros_ptr, norm_weight_ptr, first, place, out, known, outs,
    BLOCKS: tl.constexpr, COUNT: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    E8M0: tl.constexpr, ZEROS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """COUNT tiles, all of which are on their way at a time."""
    tiles = ()
    for i in tl.static_range(COUNT):
        tiles += (  # type: ignore[assignment]
            _load_tile(
                codes_ptr, scales_ptr, zeros_ptr, norm_weight_ptr, first + i * BLOCKS, place, out, known, outs,
                BLOCKS, CODES, GROUP, SCALES, E8M0, ZEROS, NORM,
            ),
        )  # fmt: skip
    return tiles


@triton.jit
def _input(x_ptr, start, col, size, GATED: tl.constexpr):
    """Elements `col` of the row of x that begins at `start` in float32, gated if GATED."""
    if GATED:
        gate = tl.load(x_ptr + 2 * start + col).to(tl.float32)
        up = tl.load(x_ptr + 2 * start + size + col).to(tl.float32)
        return gate / (1 + tl.exp(-gate)) * up
    else:  # noqa: RET505, only one branch is compiled
        return tl.load(x_ptr + start + col).to(tl.float32)


@triton.jit
def _lanes(values):
    """Sums of 16 adjacent numbers of the last dimension."""
    return tl.sum(tl.reshape(values, [values.shape[0], values.shape[1], values.shape[2] // 16, 16]), 3)


@triton.jit
def _add_tile(
    totals, squares, codes, scales, zeros, norms, x_ptr, table_ptr, rows, first, size,
    ROWS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Adds one tile's products to the accumulators, and its squares to the sums of squares, for each row."""
    WIDTH: tl.constexpr = codes.shape[2]
    HALVES: tl.constexpr = 128 // WIDTH
    if CODES <= 3:
        low = numbers(codes & 15, table_ptr, CODES, not ZEROS, tl.float32)
        weights = (low, numbers(codes >> 4, table_ptr, CODES, not ZEROS, tl.float32))
    else:
        weights = (numbers(codes, table_ptr, CODES, not ZEROS, tl.float32),)  # type: ignore[assignment]
    cols = first * 128 + tl.arange(0, codes.shape[0])[:, None] * 128 + tl.arange(0, WIDTH)[None, :]
    sums = ()
    powers = ()
    for row in tl.static_range(ROWS):
        total = totals[row]
        products = tl.zeros_like(weights[0])
        given = tl.zeros_like(total)
        start = tl.minimum(row, rows - 1) * size
        if NORM:
            power = squares[row]
        for half in tl.static_range(HALVES):
            x = _input(x_ptr, start, cols + half * WIDTH, size, GATED)
            if NORM:
                power += x * x
                x *= norms[half].to(tl.float32)
            if GROUP % 128 > 0:  # lanes differ in their scales
                part = _lanes(weights[half] * x[:, None, :])
                if ZEROS:
                    part -= zeros[half] * _lanes(x[:, None, :])
                total += part * scales[half]
            else:
                products += weights[half] * x[:, None, :]
                if ZEROS:
                    given += _lanes(x[:, None, :])
        if GROUP % 128 == 0:
            part = _lanes(products)
            if ZEROS:
                part -= zeros[0] * given
            total += part * scales[0] if SCALES else part
        sums += (total,)  # type: ignore[assignment]
        if NORM:
            powers += (power,)  # type: ignore[assignment]
    return sums, powers


@triton.jit
def _add_tiles(
    totals, squares, tiles, x_ptr, table_ptr, rows, first, size,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    ZEROS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    for i in tl.static_range(len(tiles)):
        codes, scales, zeros, norms = tiles[i]
        totals, squares = _add_tile(
            totals, squares, codes, scales, zeros, norms, x_ptr, table_ptr, rows, first + i * BLOCKS, size,
            ROWS, CODES, GROUP, SCALES, ZEROS, NORM, GATED,
        )  # fmt: skip
    return totals, squares


@triton.jit(do_not_specialize=["rows"])
def _linear_blocks_skinny_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, table_ptr, bias_ptr, norm_weight_ptr, out_ptr, rows, outs,
    size, eps,
    ROWS: tl.constexpr, OUT_TILE: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr, CODES: tl.constexpr,
    GROUP: tl.constexpr, SCALES: tl.constexpr, E8M0: tl.constexpr, ZEROS: tl.constexpr, ROW_SCALES: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # program i: outputs i * OUT_TILE ... of all rows; EARLY tiles of weights are loaded before the wait,
    # and as many at a time behind it
    if PDL:
        gdc_launch_dependents()
    WIDTH: tl.constexpr = 64 if CODES <= 3 else 128
    out = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    known = out < outs
    line = tl.arange(0, BLOCKS)[:, None] * outs + out[None, :]
    place = line[:, :, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    tiles = _load_tiles(
        codes_ptr, scales_ptr, zeros_ptr, norm_weight_ptr, 0, place, out, known, outs,
        BLOCKS, EARLY, CODES, GROUP, SCALES, E8M0, ZEROS, NORM,
    )  # fmt: skip
    bias = tl.zeros([OUT_TILE], tl.float32)
    if BIAS:
        bias += tl.load(bias_ptr + out, mask=known, other=0.0).to(tl.float32)
    factor = tl.zeros([OUT_TILE], tl.float32) + 1.0
    if ROW_SCALES:
        factor *= tl.load(row_scales_ptr + out, mask=known, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    totals = ()
    squares = ()
    before = ()
    for row in tl.static_range(ROWS):
        totals += (tl.zeros([BLOCKS, OUT_TILE, WIDTH // 16], tl.float32),)  # type: ignore[assignment]
        if NORM:
            squares += (tl.zeros([BLOCKS, WIDTH], tl.float32),)  # type: ignore[assignment]
        if ADD:
            there = out < tl.where(rows > row, outs, 0)
            before += (tl.load(out_ptr + row * outs + out, mask=there, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    totals, squares = _add_tiles(
        totals, squares, tiles, x_ptr, table_ptr, rows, 0, size,
        ROWS, BLOCKS, CODES, GROUP, SCALES, ZEROS, NORM, GATED,
    )  # fmt: skip
    for first in range(EARLY * BLOCKS, size // 128, EARLY * BLOCKS):
        tiles = _load_tiles(
            codes_ptr, scales_ptr, zeros_ptr, norm_weight_ptr, first, place, out, known, outs,
            BLOCKS, EARLY, CODES, GROUP, SCALES, E8M0, ZEROS, NORM,
        )  # fmt: skip
        totals, squares = _add_tiles(
            totals, squares, tiles, x_ptr, table_ptr, rows, first, size,
            ROWS, BLOCKS, CODES, GROUP, SCALES, ZEROS, NORM, GATED,
        )  # fmt: skip
    for row in tl.static_range(ROWS):
        y = tl.sum(tl.sum(totals[row], 2), 0) * factor
        if NORM:
            y *= tl.rsqrt(tl.sum(tl.sum(squares[row], 1), 0) / size + eps)
        if ADD:
            y += before[row]
        y += bias
        tl.store(out_ptr + row * outs + out, y.to(out_ptr.dtype.element_ty), mask=out < tl.where(rows > row, outs, 0))


def linear_blocks_skinny(
    x: Tensor,
    weights: BlockWeights,
    bias: Tensor | None,
    *,
    out_tile: int,
    tile: int,
    warps: int,
    pdl: bool,
    early: int = 1,
    norm: RMSNorm | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """x [rows, in] of at most MAX_ROWS rows, bias [out] -> [rows, out], accumulated in float32.

    A program loads `early` tiles of `tile` inputs at a time, a power of two of BLOCKs, the first ones before it waits
    for the previous kernel; they must divide the inputs. table: as `linear_blocks` takes it. The others: as
    `linear_skinny` takes them. Raises ValueError for other shapes, dtypes and layouts.
    """
    (rows, width), outs, size = x.shape, weights.outputs, weights.inputs
    if rows > MAX_ROWS or width != (2 * size if gated else size) or tile % BLOCK or size % (tile * early):
        raise ValueError(
            f"{[rows, width]} do not fit a weight {[outs, size]} in {early} tiles of {tile}, or are over {MAX_ROWS}"
        )
    if gated and norm is not None:
        raise ValueError("rows are either normalised or gated")
    given = ((bias, (outs,)), (None if norm is None else norm.weight, (size,)), (add_to, (rows, outs)), (x, x.shape))
    for i, (one, shape) in enumerate(given):
        if one is not None and (one.shape != shape or not one.is_contiguous() or (one.dtype != x.dtype and i != 1)):
            raise ValueError(f"{list(one.shape)} {one.dtype} does not fit: expected contiguous {list(shape)} {x.dtype}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device) if add_to is None else add_to
    if out.numel() == 0:
        return out
    codes, scales, zeros = weights.codes, weights.scales, weights.zeros
    _linear_blocks_skinny_kernel[(ceil_div(outs, out_tile),)](
        x, codes, codes if scales is None else scales, codes if zeros is None else zeros,
        codes if weights.row_scales is None else weights.row_scales, codes if table is None else table,
        codes if bias is None else bias, codes if norm is None else norm.weight, out, rows, outs, size,
        0.0 if norm is None else norm.eps,
        ROWS=next_power_of_2(rows), OUT_TILE=out_tile, BLOCKS=tile // BLOCK, EARLY=early,
        CODES=int(weights.kind), GROUP=weights.group, SCALES=scales is not None, E8M0=weights.is_e8m0,
        ZEROS=zeros is not None, ROW_SCALES=weights.row_scales is not None,
        BIAS=bias is not None, NORM=norm is not None, GATED=gated, ADD=add_to is not None, PDL=pdl, num_warps=warps,
        **pdl_options(pdl),
    )  # fmt: skip
    return out
