"""The second product of adapters, with B, added to a layer's outputs: one kernel for all its parts. `add_adapters`
launches it."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.lora.adapter_tiles import load_tile, multiply, next_tile
from blockyard.kernels.programmatic_launch import prefetch


@triton.jit
def inverse_lengths(squares_ptr, rows, inputs, eps, splits, num_rows, SPLITS: tl.constexpr):
    """What an RMSNorm multiplies rows [ROWS] with, of the sums of squares of their splits."""
    split = tl.arange(0, SPLITS)
    known = (rows < num_rows)[:, None] & (split < splits)[None, :]
    squares = tl.load(squares_ptr + split[None, :] * num_rows + rows[:, None], mask=known, other=0.0)
    return tl.rsqrt(tl.sum(squares, 1) / inputs + eps)


@triton.jit
def times_b(
    h_ptr, b_ptr, factors, rows, cols, size, rank, splits, h_row, h_split, num_rows,
    SPLITS: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The products [ROWS, OUTPUTS] of rows of h, added up over splits, with columns of B; WIDE divides the rank. NORM:
    of h times factors [ROWS]."""
    pitch = rank // WIDE * WIDE
    total = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
    for begin in range(0, pitch, RANKS):
        ranks = begin + tl.arange(0, RANKS)
        at = h_ptr + rows.to(tl.int64)[:, None] * h_row + ranks[None, :]
        h = tl.load(at, mask=(rows < num_rows)[:, None] & (ranks < pitch)[None, :], other=0.0)
        for split in tl.static_range(1, SPLITS):
            inside = (rows < num_rows)[:, None] & (ranks < tl.where(splits > split, pitch, 0))[None, :]
            h += tl.load(at + split * h_split, mask=inside, other=0.0)
        if NORM:
            h *= factors[:, None]
        b_at = b_ptr + cols.to(tl.int64)[:, None] * pitch + ranks[None, :]
        b = tl.load(b_at, mask=(cols < size)[:, None] & (ranks < pitch)[None, :], other=0.0)
        total = multiply(h.to(b.dtype), tl.trans(b), total)
    return total


@triton.jit
def expand_rows(
    h_ptr, squares_ptr, out_ptr, arena_ptr, offsets_ptr, ranks_ptr, weights_ptr, rows, entry, cols, start, size,
    splits, h_row, h_split, num_rows, out_stride, inputs, eps,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, SPLITS: tl.constexpr, RANKS: tl.constexpr, WIDE: tl.constexpr,
    WEIGHTS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Adds the products of rows with one adapter to some outputs."""
    rank = tl.load(ranks_ptr + entry)
    bias_at = tl.load(offsets_ptr + entry * OFFSETS + 2)
    if (rank > 0) | (bias_at >= 0):
        b_ptr = arena_ptr + tl.multiple_of(tl.load(offsets_ptr + entry * OFFSETS + 1), ALIGNED)
        factors = 1.0
        if NORM:
            factors = inverse_lengths(squares_ptr, rows, inputs, eps, splits, num_rows, SPLITS)
        if rank % WIDE == 0:
            total = times_b(
                h_ptr, b_ptr, factors, rows, cols, size, rank, splits, h_row, h_split, num_rows,
                SPLITS, RANKS, WIDE, NORM,
            )  # fmt: skip
        else:
            total = times_b(
                h_ptr, b_ptr, factors, rows, cols, size, rank, splits, h_row, h_split, num_rows, SPLITS, RANKS, 1, NORM
            )
        if bias_at >= 0:
            total += tl.load(arena_ptr + bias_at + cols, mask=cols < size, other=0.0).to(tl.float32)[None, :]
        if WEIGHTS:
            total *= tl.load(weights_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        inside = (rows < num_rows)[:, None] & (cols < size)[None, :]
        target = out_ptr + rows.to(tl.int64)[:, None] * out_stride + (start + cols)[None, :]
        total += tl.load(target, mask=inside, other=0.0).to(tl.float32)
        tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "splits"])
def expand_kernel(
    h_ptr, squares_ptr, rows_ptr, owners_ptr, places_ptr, weights_ptr, arena_ptr, offsets_ptr, ranks_ptr, starts_ptr,
    sizes_ptr, out_ptr, num_rows, num_tiles, splits, out_stride, parts, max_rank, tiles_of_part, rows_of_place,
    place_stride, inputs, eps,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    RANKS: tl.constexpr, SPLITS: tl.constexpr, WIDE: tl.constexpr, WIDE_OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr,
    WEIGHTS: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (t, j): tiles t, t + programs, ... of rows, tile j of the outputs of all parts
    tile, part = tl.program_id(0), tl.program_id(1) // tiles_of_part
    cols = tl.program_id(1) % tiles_of_part * OUTPUTS + tl.arange(0, OUTPUTS)
    start, size = tl.load(starts_ptr + part), tl.load(sizes_ptr + part)
    if WIDE_OUTPUTS:
        start, size = tl.multiple_of(start, ALIGNED), tl.multiple_of(size, ALIGNED)
    if PDL:
        gdc_launch_dependents()
        if EARLY:  # B of the first tile
            place, _rows = load_tile(rows_ptr, owners_ptr, tile, num_rows, TILE, ROWS)
            if place >= 0:
                entry = place * place_stride + part
                rank = tl.load(ranks_ptr + entry)
                b_ptr = arena_ptr + tl.load(offsets_ptr + entry * OFFSETS + 1)
                line = tl.where((cols < size) & (rank > 0), b_ptr + cols.to(tl.int64) * rank, arena_ptr)
                prefetch(line)
        gdc_wait()
    if tl.program_id(1) % tiles_of_part * OUTPUTS >= size:
        return
    h_ptr += part * max_rank
    h_row = parts * max_rank
    h_split = tl.cast(num_rows, tl.int64) * h_row
    while tile < num_tiles:
        owner, rows = load_tile(rows_ptr, owners_ptr, tile, num_rows, TILE, ROWS)
        if EXPERTS:
            places = tl.load(places_ptr + rows // rows_of_place, mask=rows < num_rows, other=-1)
            place = tl.max(places, 0).to(tl.int64)
            while place >= 0:
                own = tl.where(places == place, rows, num_rows)
                entry = place * place_stride + owner * parts + part
                expand_rows(
                    h_ptr, squares_ptr, out_ptr, arena_ptr, offsets_ptr, ranks_ptr, weights_ptr, own, entry, cols,
                    start, size, splits, h_row, h_split, num_rows, out_stride, inputs, eps,
                    OFFSETS, ALIGNED, SPLITS, RANKS, WIDE, WEIGHTS, NORM,
                )  # fmt: skip
                places = tl.where(places == place, -1, places)
                place = tl.max(places, 0).to(tl.int64)
        elif owner >= 0:
            expand_rows(
                h_ptr, squares_ptr, out_ptr, arena_ptr, offsets_ptr, ranks_ptr, weights_ptr, rows,
                owner * place_stride + part, cols, start, size, splits, h_row, h_split, num_rows, out_stride, inputs,
                eps, OFFSETS, ALIGNED, SPLITS, RANKS, WIDE, WEIGHTS, NORM,
            )  # fmt: skip
        tile = next_tile(tile, owner, num_tiles, TILE)
