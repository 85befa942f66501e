"""The second product of adapters where a layer has few outputs, of tiles of at most 16 rows.

An item of work is a tile of rows and some outputs of a part. Programs take items in turn, a program every n-th one of n
programs: tiles with rows come first, so a program ends at its first tile without rows, and its number tells all of an
item. Nothing is kept from one item to the next. Programs are therefore small: many of them are there, with B in
registers, while the kernel before still has most of a multiprocessor. `add_adapters` launches this kernel.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.lora.adapter_tiles import multiply
from blockyard.kernels.lora.expand import load_entry, load_h, load_out
from blockyard.kernels.programmatic_launch import wait_for_work


@triton.jit
def load_owner(owners_ptr, tile, num_tiles):
    """The place of a tile's adapter, below 0 for a tile without rows."""
    return tl.load(owners_ptr + tile, mask=tile < num_tiles, other=-1).to(tl.int64)


@triton.jit
def behind_loads(matrix, PDL: tl.constexpr):
    """The same numbers, which the compiler moves to shared memory here, and not before earlier loads."""
    if PDL:
        PACK: tl.constexpr = 32 // matrix.dtype.primitive_bitwidth
        matrix = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [matrix], dtype=matrix.dtype, is_pure=False, pack=PACK
        )
    return matrix


@triton.jit
def locate_part(tile, sizes_ptr, parts, PARTS: tl.constexpr, OUTPUTS: tl.constexpr):
    """The part of a tile of the outputs of all parts, and the tile's first output, behind them for no such tile."""
    part = tl.arange(0, PARTS)
    tiles = tl.cdiv(tl.load(sizes_ptr + part, mask=part < parts, other=0), OUTPUTS)
    before = tl.cumsum(tiles, 0) - tiles
    own = tl.sum((before <= tile).to(tl.int32), 0) - 1
    return own, (tile - tl.sum(tl.where(part == own, before, 0), 0)) * OUTPUTS


@triton.jit
def load_b_columns(b_ptr, cols, end, ranks, rank, WIDE: tl.constexpr):
    """B [RANKS, OUTPUTS], of outputs before `end`; in wide loads if the rank allows it."""
    if rank % WIDE == 0:
        b = load_pitched_columns(b_ptr, cols, end, ranks, rank // WIDE * WIDE)
    else:
        b = load_pitched_columns(b_ptr, cols, end, ranks, rank)
    return b


@triton.jit
def load_pitched_columns(b_ptr, cols, end, ranks, rank):
    """As `load_b_columns`; loads are as wide as what is known of the rank allows."""
    inside = (ranks < rank)[:, None] & (cols < end)[None, :]
    return tl.load(b_ptr + cols.to(tl.int64)[None, :] * rank + ranks[:, None], mask=inside, other=0.0)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "of_tile"])
def expand_few_kernel(
    h_ptr, squares_ptr, rows_ptr, owners_ptr, arena_ptr, offsets_ptr, ranks_ptr, starts_ptr, sizes_ptr, out_ptr,
    num_rows, num_tiles, of_tile, out_stride, parts, padded_rank, place_stride, inputs, eps,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr, MANY_RANKS: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr,
    OUTPUTS_ALIGNED: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    item, h_row, ranks = tl.program_id(0), parts * padded_rank, tl.arange(0, RANKS)
    place = load_owner(owners_ptr, item // of_tile, num_tiles)
    while place >= 0:
        following = item + tl.num_programs(0)
        next_place = load_owner(owners_ptr, following // of_tile, num_tiles)
        part, begin = locate_part(item % of_tile, sizes_ptr, parts, PARTS, OUTPUTS)
        start = tl.multiple_of(tl.load(starts_ptr + part, mask=part < parts, other=0), OUTPUTS_ALIGNED)
        size = tl.multiple_of(tl.load(sizes_ptr + part, mask=part < parts, other=0), OUTPUTS_ALIGNED)
        rows = tl.load(rows_ptr + item // of_tile * TILE + tl.arange(0, TILE))
        rank, b_ptr, bias_at = load_entry(
            arena_ptr, offsets_ptr, ranks_ptr, place * place_stride + part, begin < size, OFFSETS, ALIGNED
        )
        cols = begin + tl.arange(0, OUTPUTS)
        b = load_b_columns(b_ptr, cols, size, ranks, rank, WIDE)
        if (rank > 0) | (bias_at >= 0):
            if PDL and EARLY:
                gdc_wait()
            is_row, h_part = rows < num_rows, h_ptr + part * padded_rank
            out_rows = out_ptr + rows.to(tl.int64) * out_stride + start
            out = load_out(out_rows, is_row, cols, size)
            h = load_h(
                h_part, squares_ptr, rows, ranks, rank, SPLITS, h_row, num_rows, inputs, eps,
                SPLITS, True, ALIGNED, NORM,
            )  # fmt: skip
            total = multiply(h.to(b.dtype), behind_loads(b, PDL), tl.zeros([TILE, OUTPUTS], tl.float32))
            if MANY_RANKS:
                for first in range(RANKS, rank, RANKS):
                    b = load_b_columns(b_ptr, cols, size, first + ranks, rank, WIDE)
                    h = load_h(
                        h_part, squares_ptr, rows, first + ranks, rank, SPLITS, h_row, num_rows, inputs, eps,
                        SPLITS, True, ALIGNED, NORM,
                    )  # fmt: skip
                    total = multiply(h.to(b.dtype), b, total)
            if bias_at >= 0:
                total += tl.load(arena_ptr + bias_at + cols, mask=cols < size, other=0.0).to(tl.float32)[None, :]
            total += out.to(tl.float32)
            tl.store(
                out_rows[:, None] + cols[None, :], total.to(out.dtype), mask=is_row[:, None] & (cols < size)[None, :]
            )
        item, place = following, next_place
    if PDL and EARLY:
        wait_for_work(place >= 0)
