"""The second product of adapters, of tiles of rows with B, added to a layer's outputs: one kernel for all its parts.
`add_adapters` launches it.

An item of work is a tile of rows and OUTPUTS outputs of a part; a slab has the items of one tile and part. A program
takes items in a row. Of those of a slab it reads the table and adds up h over its splits once, and multiplies one while
it loads the next ones. It loads B of its first item before it waits for the kernel before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.lora.adapter_tiles import load_tile, multiply, own_items
from blockyard.kernels.programmatic_launch import wait_for_work

MOST_SPLITS = tl.constexpr(32)  # of the inputs


@triton.jit
def inverse_lengths(squares_ptr, rows, inputs, eps, splits, end, num_rows):
    """What an RMSNorm multiplies rows [ROWS] before `end` with, of the sums of squares of their splits."""
    split = tl.arange(0, MOST_SPLITS)
    known = (rows < end)[:, None] & (split < splits)[None, :]
    squares = tl.load(squares_ptr + split[None, :] * num_rows + rows[:, None], mask=known, other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / inputs + eps)


@triton.jit
def sum_splits(
    h_ptr, rows, ranks, rank, splits, h_row, num_rows,
    SPLITS: tl.constexpr, ALL_SPLITS: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """h [ROWS, RANKS], added up over its splits; behind the rank are any numbers. ALL_SPLITS: there are SPLITS,
    otherwise SPLITS at most."""
    at = h_ptr + rows[:, None].to(tl.int64) * h_row + ranks[None, :]
    h = tl.zeros([rows.shape[0], ranks.shape[0]], tl.float32)
    h_split, padded = tl.cast(num_rows, tl.int64) * h_row, tl.cdiv(rank, ALIGNED) * ALIGNED
    inside = (rows[:, None] < num_rows) & (ranks < padded)[None, :]
    for split in tl.static_range(SPLITS):
        if not ALL_SPLITS:
            inside = (rows[:, None] < num_rows) & (ranks < tl.where(splits > split, padded, 0))[None, :]
        h += tl.load(at, mask=inside, other=0.0)
        at += h_split
    return h


@triton.jit
def load_b(b_ptr, cols, end, ranks, rank, WIDE: tl.constexpr):
    """B [OUTPUTS, RANKS], of outputs before `end`; in wide loads if the rank allows it."""
    if rank % WIDE == 0:
        b = load_pitched(b_ptr, cols, end, ranks, rank // WIDE * WIDE)
    else:
        b = load_pitched(b_ptr, cols, end, ranks, rank)
    return b


@triton.jit
def load_pitched(b_ptr, cols, end, ranks, rank):
    """As `load_b`; loads are as wide as what is known of the rank allows."""
    inside = (cols < end)[:, None] & (ranks < rank)[None, :]
    return tl.load(b_ptr + cols.to(tl.int64)[:, None] * rank + ranks[None, :], mask=inside, other=0.0)


@triton.jit
def load_entry(arena_ptr, offsets_ptr, ranks_ptr, entry, exists, OFFSETS: tl.constexpr, ALIGNED: tl.constexpr):
    """The rank of an adapter for a part, where its B begins, and the offset of its bias, below 0 for none."""
    rank = tl.load(ranks_ptr + entry, mask=exists, other=0)
    begin = tl.load(offsets_ptr + entry * OFFSETS + 1, mask=exists, other=0)
    bias_at = tl.load(offsets_ptr + entry * OFFSETS + 2, mask=exists, other=-1)
    return rank, arena_ptr + tl.multiple_of(begin, ALIGNED), bias_at


@triton.jit
def load_h(
    h_ptr, squares_ptr, rows, ranks, rank, splits, h_row, num_rows, inputs, eps,
    SPLITS: tl.constexpr, ALL_SPLITS: tl.constexpr, ALIGNED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """h [ROWS, RANKS]; NORM: of rows that are normalised."""
    h = sum_splits(h_ptr, rows, ranks, rank, splits, h_row, num_rows, SPLITS, ALL_SPLITS, ALIGNED)
    if NORM:
        h *= inverse_lengths(squares_ptr, rows, inputs, eps, splits, tl.where(rank > 0, num_rows, 0), num_rows)[:, None]
    return tl.where((ranks < rank)[None, :], h, 0.0)


@triton.jit
def load_out(out_rows, is_row, cols, end):
    return tl.load(out_rows[:, None] + cols[None, :], mask=is_row[:, None] & (cols < end)[None, :], other=0.0)


@triton.jit
def add_tile(
    out, h, b, out_rows, bias_ptr, weights_ptr, rows, is_row, has_bias, cols, end, WEIGHTS: tl.constexpr
):  # fmt: skip
    """Stores out [ROWS, OUTPUTS] and what is added to it."""
    total = multiply(h.to(b.dtype), tl.trans(b), tl.zeros([h.shape[0], b.shape[0]], tl.float32))
    if has_bias:
        total += tl.load(bias_ptr + cols, mask=cols < end, other=0.0).to(tl.float32)[None, :]
    if WEIGHTS:
        total *= tl.load(weights_ptr + rows, mask=is_row, other=0.0)[:, None]
    total += out.to(tl.float32)
    inside = is_row[:, None] & (cols < end)[None, :]
    tl.store(out_rows[:, None] + cols[None, :], total.to(out.dtype), mask=inside)


@triton.jit
def add_tiles(
    h, out_rows, bias_ptr, b_ptr, weights_ptr, rows, is_row, ranks, rank, has_bias, begin, end,
    OUTPUTS: tl.constexpr, STAGES: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Adds the products of h to several tiles of outputs: B and outputs of the next ones are loaded meanwhile."""
    for start in tl.range(begin, end, OUTPUTS, num_stages=STAGES):
        cols = start + tl.arange(0, OUTPUTS)
        b, out = load_pitched(b_ptr, cols, end, ranks, rank), load_out(out_rows, is_row, cols, end)
        add_tile(out, h, b, out_rows, bias_ptr, weights_ptr, rows, is_row, has_bias, cols, end, WEIGHTS)


@triton.jit
def add_slab(
    h, out_rows, bias_ptr, b_ptr, weights_ptr, rows, is_row, ranks, rank, has_bias, begin, end,
    OUTPUTS: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """As `add_tiles`, with wide loads if WIDE divides the rank, and tile by tile otherwise."""
    if rank % WIDE == 0:
        add_tiles(
            h, out_rows, bias_ptr, b_ptr, weights_ptr, rows, is_row, ranks, rank // WIDE * WIDE, has_bias, begin, end,
            OUTPUTS, STAGES, WEIGHTS,
        )  # fmt: skip
    else:
        add_tiles(
            h, out_rows, bias_ptr, b_ptr, weights_ptr, rows, is_row, ranks, rank, has_bias, begin, end,
            OUTPUTS, 1, WEIGHTS,
        )  # fmt: skip


@triton.jit
def add_rows(
    h_ptr, squares_ptr, out_ptr, arena_ptr, weights_ptr, rows, b, rank, b_ptr, bias_at, begin, end, start, splits,
    h_row, num_rows, out_stride, inputs, eps,
    ALIGNED: tl.constexpr, SPLITS: tl.constexpr, ALL_SPLITS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr,
    WIDE: tl.constexpr, WEIGHTS: tl.constexpr, NORM: tl.constexpr, MANY: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds the products of rows with one adapter to the outputs of a part from `begin` to `end`, of which b has the
    first if there are at most RANKS ranks. MANY: of a piece of more ranks; 0: there are none."""
    has_bias = bias_at >= 0
    if (rank > 0) | has_bias:
        out_rows, is_row, bias_ptr = (
            out_ptr + rows.to(tl.int64) * out_stride + start,
            rows < num_rows,
            arena_ptr + bias_at,
        )
        if rank <= RANKS:
            cols, ranks = begin + tl.arange(0, OUTPUTS), tl.arange(0, RANKS)
            out = load_out(out_rows, is_row, cols, end)
            h = load_h(
                h_ptr, squares_ptr, rows, ranks, rank, splits, h_row, num_rows, inputs, eps,
                SPLITS, ALL_SPLITS, ALIGNED, NORM,
            )  # fmt: skip
            add_tile(out, h, b, out_rows, bias_ptr, weights_ptr, rows, is_row, has_bias, cols, end, WEIGHTS)
            add_slab(
                h.to(b.dtype), out_rows, bias_ptr, b_ptr, weights_ptr, rows, is_row, ranks, rank, has_bias,
                begin + OUTPUTS, end, OUTPUTS, WIDE, STAGES, WEIGHTS,
            )  # fmt: skip
        elif MANY:
            FEWER: tl.constexpr = OUTPUTS * RANKS // MANY  # as large tiles of B
            for first in range(0, rank, MANY):
                ranks = first + tl.arange(0, MANY)
                h = load_h(
                    h_ptr, squares_ptr, rows, ranks, rank, splits, h_row, num_rows, inputs, eps,
                    SPLITS, ALL_SPLITS, ALIGNED, NORM,
                ).to(b.dtype)  # fmt: skip
                add_slab(
                    h, out_rows, bias_ptr, b_ptr, weights_ptr, rows, is_row, ranks, rank, has_bias, begin, end,
                    FEWER, WIDE, STAGES, WEIGHTS,
                )  # fmt: skip
                has_bias = False
                tl.debug_barrier()  # threads may read outputs that others have written for the piece before


@triton.jit
def locate(
    slab, first, last, parts, tiles_of_part, starts_ptr, sizes_ptr, OUTPUTS: tl.constexpr, ALIGNED: tl.constexpr
):
    """The tile and the part of a slab, the first output and the end of its items from `first` to `last`, where the part
    begins, and whether there is such a slab. ALIGNED divides the beginning and size of parts."""
    part, items = slab % parts, slab * tiles_of_part
    exists = items < last
    start = tl.multiple_of(tl.load(starts_ptr + part, mask=exists, other=0), ALIGNED)
    size = tl.multiple_of(tl.load(sizes_ptr + part, mask=exists, other=0), ALIGNED)
    end = tl.minimum(tl.minimum(last - items, tiles_of_part) * OUTPUTS, size)
    return slab // parts, part, tl.maximum(first - items, 0) * OUTPUTS, end, start, exists


@triton.jit
def load_slab(
    slab, first, last, rows_ptr, owners_ptr, arena_ptr, offsets_ptr, ranks_ptr, starts_ptr, sizes_ptr, num_rows, parts,
    tiles_of_part, place_stride,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr, WIDE: tl.constexpr, OUTPUTS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """All of a slab that no kernel of the step's layers writes; behind the last one nothing is there.

    Its part, outputs and rows, what the table says of the adapter, and the first of B.
    """
    tile, part, begin, end, start, exists = locate(
        slab, first, last, parts, tiles_of_part, starts_ptr, sizes_ptr, OUTPUTS, OUTPUTS_ALIGNED
    )
    place, rows = load_tile(rows_ptr, owners_ptr, tile, exists, num_rows, TILE, ROWS)
    rank, b_ptr, bias_at = load_entry(
        arena_ptr, offsets_ptr, ranks_ptr, place * place_stride + part, place >= 0, OFFSETS, ALIGNED
    )
    b = load_b(b_ptr, begin + tl.arange(0, OUTPUTS), end, tl.arange(0, RANKS), rank, WIDE)
    return part, begin, end, start, rows, rank, b_ptr, bias_at, b


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "splits"])
def expand_kernel(
    h_ptr, squares_ptr, rows_ptr, owners_ptr, places_ptr, weights_ptr, arena_ptr, offsets_ptr, ranks_ptr, starts_ptr,
    sizes_ptr, out_ptr, num_rows, num_tiles, splits, out_stride, parts, padded_rank, tiles_of_part, rows_of_place,
    place_stride, inputs, eps,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr, SPLITS: tl.constexpr, ALL_SPLITS: tl.constexpr, WIDE: tl.constexpr,
    OUTPUTS_ALIGNED: tl.constexpr, EXPERTS: tl.constexpr, WEIGHTS: tl.constexpr, NORM: tl.constexpr,
    MANY: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    first, last = own_items(owners_ptr, num_tiles, parts * tiles_of_part)
    h_row, cols, ranks = parts * padded_rank, tl.arange(0, OUTPUTS), tl.arange(0, RANKS)
    slab, slabs = first // tiles_of_part, tl.cdiv(last, tiles_of_part)
    if EXPERTS:
        for own_slab in tl.range(slab, slabs, num_stages=1):
            tile, part, begin, end, start, exists = locate(
                own_slab, first, last, parts, tiles_of_part, starts_ptr, sizes_ptr, OUTPUTS, OUTPUTS_ALIGNED
            )
            owner, rows = load_tile(rows_ptr, owners_ptr, tile, exists, num_rows, TILE, ROWS)
            places = tl.load(places_ptr + rows // rows_of_place, mask=rows < num_rows, other=-1)
            place = tl.max(places, 0).to(tl.int64)
            while place >= 0:
                rank, b_ptr, bias_at = load_entry(
                    arena_ptr, offsets_ptr, ranks_ptr, place * place_stride + owner * parts + part, True,
                    OFFSETS, ALIGNED,
                )  # fmt: skip
                b = load_b(b_ptr, begin + cols, end, ranks, rank, WIDE)
                add_rows(
                    h_ptr + part * padded_rank, squares_ptr, out_ptr, arena_ptr, weights_ptr,
                    tl.where(places == place, rows, num_rows), b, rank, b_ptr, bias_at, begin, end, start, splits,
                    h_row, num_rows, out_stride, inputs, eps,
                    ALIGNED, SPLITS, ALL_SPLITS, RANKS, OUTPUTS, WIDE, WEIGHTS, NORM, MANY, STAGES,
                )  # fmt: skip
                places = tl.where(places == place, -1, places)
                place = tl.max(places, 0).to(tl.int64)
    else:
        part, begin, end, start, rows, rank, b_ptr, bias_at, b = load_slab(
            slab, first, last, rows_ptr, owners_ptr, arena_ptr, offsets_ptr, ranks_ptr, starts_ptr, sizes_ptr, num_rows,
            parts, tiles_of_part, place_stride,
            OFFSETS, ALIGNED, TILE, ROWS, OUTPUTS, RANKS, WIDE, OUTPUTS_ALIGNED,
        )  # fmt: skip
        if PDL and EARLY:
            wait_for_work(first < last)
        for following in tl.range(slab + 1, slabs + 1, num_stages=1):
            add_rows(
                h_ptr + part * padded_rank, squares_ptr, out_ptr, arena_ptr, weights_ptr, rows, b, rank, b_ptr, bias_at,
                begin, end, start, splits, h_row, num_rows, out_stride, inputs, eps,
                ALIGNED, SPLITS, ALL_SPLITS, RANKS, OUTPUTS, WIDE, WEIGHTS, NORM, MANY, STAGES,
            )  # fmt: skip
            part, begin, end, start, rows, rank, b_ptr, bias_at, b = load_slab(
                following, first, last, rows_ptr, owners_ptr, arena_ptr, offsets_ptr, ranks_ptr, starts_ptr, sizes_ptr,
                num_rows, parts, tiles_of_part, place_stride,
                OFFSETS, ALIGNED, TILE, ROWS, OUTPUTS, RANKS, WIDE, OUTPUTS_ALIGNED,
            )  # fmt: skip
