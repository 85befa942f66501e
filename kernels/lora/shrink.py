"""The first product of adapters, of rows with A: one kernel for all parts of a layer. `add_adapters` launches it.

Rows may be normalised or gated as they are read. Of a norm, rows are multiplied by its weight here, and by the inverse
of their length where the product is read: programs that share the inputs of a row each store their sum of squares.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.lora.adapter_tiles import load_tile, multiply, next_tile
from blockyard.kernels.programmatic_launch import prefetch


@triton.jit
def a_rows(
    arena_ptr, offsets_ptr, ranks_ptr, own_ptr, entry, rank, exists, inputs,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Of each number between the products: where its row of A begins, whether A has it, and the first that A has."""
    if OWN:
        first = tl.load(own_ptr + entry * 2, mask=exists, other=0)
        count = tl.load(own_ptr + entry * 2 + 1, mask=exists, other=0)
    else:
        first = tl.zeros_like(rank)
        count = tl.load(ranks_ptr + entry, mask=exists, other=0)
    inside = rank < count
    begins = tl.multiple_of(tl.load(offsets_ptr + entry * OFFSETS, mask=inside, other=0), [ALIGNED])
    return arena_ptr + begins + rank.to(tl.int64) * inputs, inside, first


@triton.jit
def load_x(x_rows, cols, inside, inputs, GATED: tl.constexpr):
    """Inputs [ROWS, INPUTS]; GATED: silu(gate) * up, which a row has side by side."""
    x = tl.load(x_rows[:, None] + cols[None, :], mask=inside, other=0.0)
    if GATED:
        gate = x.to(tl.float32)
        up = tl.load(x_rows[:, None] + (inputs + cols)[None, :], mask=inside, other=0.0)
        x = (gate / (1 + tl.exp(-gate)) * up).to(x.dtype)
    return x


@triton.jit
def shrink_rows(
    x_ptr, norm_ptr, h_ptr, squares_ptr, arena_ptr, offsets_ptr, ranks_ptr, own_ptr, rows, entry, part, rank, parts,
    begin, end, num_rows, x_stride, inputs, max_rank, rows_of_x,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, INPUTS: tl.constexpr, OWN: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """The products of rows with one adapter, for inputs from `begin` to `end`. NORM: and their sums of squares, which
    all programs of these inputs have."""
    a_ptr, inside, first = a_rows(
        arena_ptr, offsets_ptr, ranks_ptr, own_ptr, entry, rank, part < parts, inputs,
        OFFSETS, ALIGNED, OWN,
    )  # fmt: skip
    if tl.max(inside.to(tl.int32), 0) > 0:
        is_row = rows < num_rows
        x_rows = x_ptr + (rows // rows_of_x).to(tl.int64) * x_stride
        total = tl.zeros([rows.shape[0], rank.shape[0]], tl.float32)
        squares = tl.zeros([rows.shape[0]], tl.float32)
        for start in range(begin, end, INPUTS):
            cols = start + tl.arange(0, INPUTS)
            x = load_x(x_rows, cols, is_row[:, None] & (cols < inputs)[None, :], inputs, GATED)
            if NORM:
                wide = x.to(tl.float32)
                squares += tl.sum(wide * wide, 1)
                wide *= tl.load(norm_ptr + cols, mask=cols < inputs, other=0.0).to(tl.float32)[None, :]
                x = wide if x_ptr.dtype.element_ty == tl.float16 else wide.to(x.dtype)  # float16 might overflow
            a = tl.load(a_ptr[None, :] + cols[:, None], mask=inside[None, :] & (cols < inputs)[:, None], other=0.0)
            total = multiply(x, a, total)
        at = rows.to(tl.int64)[:, None] * (parts * max_rank) + (part * max_rank + first + rank)[None, :]
        tl.store(h_ptr + at, total, mask=is_row[:, None] & inside[None, :])
        if NORM:
            tl.store(squares_ptr + rows, squares, mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "steps"])
def shrink_kernel(
    x_ptr, norm_ptr, rows_ptr, owners_ptr, places_ptr, arena_ptr, offsets_ptr, ranks_ptr, own_ptr, h_ptr, squares_ptr,
    num_rows, num_tiles, steps, x_stride, inputs, parts, max_rank, padded_rank, rows_of_x, rows_of_place, place_stride,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr,
    INPUTS: tl.constexpr, OWN: tl.constexpr, EXPERTS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (t, n, s): tiles t, t + programs, ... of rows, tile n of the numbers between the products of all parts,
    # split s of the inputs
    number = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    part, rank = number // padded_rank, number % padded_rank
    begin = tl.program_id(2) * steps * INPUTS
    end = tl.minimum(begin + steps * INPUTS, inputs)
    tile = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        if EARLY:  # A of the first tile
            place, _rows = load_tile(rows_ptr, owners_ptr, tile, num_rows, TILE, ROWS)
            if place >= 0:
                a_ptr, inside, _ = a_rows(
                    arena_ptr, offsets_ptr, ranks_ptr, own_ptr, place * place_stride + part, rank, part < parts,
                    inputs, OFFSETS, ALIGNED, OWN,
                )  # fmt: skip
                for start in range(begin, tl.minimum(end, begin + 4 * INPUTS), INPUTS):
                    cols = start + tl.arange(0, INPUTS // 64) * 64
                    is_line = inside[:, None] & (cols < inputs)[None, :]
                    prefetch(tl.where(is_line, a_ptr[:, None] + cols[None, :], arena_ptr))
        gdc_wait()
    h_ptr += tl.program_id(2).to(tl.int64) * num_rows * parts * max_rank
    squares_ptr += tl.program_id(2) * num_rows
    while tile < num_tiles:
        owner, rows = load_tile(rows_ptr, owners_ptr, tile, num_rows, TILE, ROWS)
        if EXPERTS:
            places = tl.load(places_ptr + rows // rows_of_place, mask=rows < num_rows, other=-1)
            place = tl.max(places, 0).to(tl.int64)
            while place >= 0:
                own = tl.where(places == place, rows, num_rows)
                entry = place * place_stride + owner * parts + part
                shrink_rows(
                    x_ptr, norm_ptr, h_ptr, squares_ptr, arena_ptr, offsets_ptr, ranks_ptr, own_ptr, own, entry, part,
                    rank, parts, begin, end, num_rows, x_stride, inputs, max_rank, rows_of_x,
                    OFFSETS, ALIGNED, INPUTS, OWN, NORM, GATED,
                )  # fmt: skip
                places = tl.where(places == place, -1, places)
                place = tl.max(places, 0).to(tl.int64)
        elif owner >= 0:
            shrink_rows(
                x_ptr, norm_ptr, h_ptr, squares_ptr, arena_ptr, offsets_ptr, ranks_ptr, own_ptr, rows,
                owner * place_stride + part, part, rank, parts, begin, end, num_rows, x_stride, inputs, max_rank,
                rows_of_x, OFFSETS, ALIGNED, INPUTS, OWN, NORM, GATED,
            )  # fmt: skip
        tile = next_tile(tile, owner, num_tiles, TILE)
