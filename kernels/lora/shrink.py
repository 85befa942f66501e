"""The first product of adapters, of tiles of rows with A: one kernel for all parts of a layer. `add_adapters` launches
it.

An item of work is a tile of rows, some of the numbers between the products, and a split of the inputs. A program reads
A of its next item before it multiplies one, and A of the first item before it waits for the kernel before.

Behind a product that announced it when all before had ended, programs read the product's inputs without a wait: both
kernels run side by side.

Rows may be normalised or gated as they are read. Of a norm, rows are multiplied by its weight here, and by the inverse
of their length where the product is read: programs that share the inputs of a row each store their sum of squares.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.lora.adapter_tiles import load_tile, multiply, own_items
from blockyard.kernels.programmatic_launch import wait_for_work


@triton.jit
def find_a(
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
    begins = tl.load(offsets_ptr + entry * OFFSETS, mask=exists, other=0)  # beside the ranks, not behind them
    inside = rank < count
    begins = tl.multiple_of(tl.where(inside, begins, 0), [ALIGNED])
    return arena_ptr + begins + rank.to(tl.int64) * inputs, inside, first


@triton.jit
def load_a(a_ptr, inside, cols, inputs):
    """A [NUMBERS, INPUTS]."""
    return tl.load(a_ptr[:, None] + cols[None, :], mask=inside[:, None] & (cols < inputs)[None, :], other=0.0)


@triton.jit
def load_x(x_rows, cols, inside, inputs, GATED: tl.constexpr):
    """Inputs [ROWS, INPUTS]; GATED: silu(gate) * up, which a row has side by side."""
    x = tl.load(x_rows + cols[None, :], mask=inside, other=0.0)
    if GATED:
        gate = x.to(tl.float32)
        up = tl.load(x_rows + (inputs + cols)[None, :], mask=inside, other=0.0)
        x = (gate / (1 + tl.exp(-gate)) * up).to(x.dtype)
    return x


@triton.jit
def multiply_step(x, norm_ptr, a, cols, inputs, total, squares, IS_HALF: tl.constexpr, NORM: tl.constexpr):
    """Adds the products of some inputs to total [ROWS, NUMBERS]; NORM: and their squares to squares [ROWS]."""
    if NORM:
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        wide *= tl.load(norm_ptr + cols, mask=cols < inputs, other=0.0).to(tl.float32)[None, :]
        x = wide if IS_HALF else wide.to(x.dtype)  # float16 might overflow
    return multiply(x, tl.trans(a), total), squares


@triton.jit
def shrink_rows(
    x_rows, norm_ptr, h_ptr, squares_ptr, rows, x, a_ptr, inside, number, a, begin, end, num_rows, inputs, numbers,
    INPUTS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Stores the products of rows with one adapter, for inputs from `begin` to `end`; x and a have the first of them.
    NORM: and their sums of squares, which all programs of these inputs have."""
    IS_HALF: tl.constexpr = x_rows.dtype.element_ty == tl.float16
    if tl.max(inside.to(tl.int32), 0) > 0:
        total = tl.zeros([rows.shape[0], number.shape[0]], tl.float32)
        squares = tl.zeros([rows.shape[0]], tl.float32)
        cols = begin + tl.arange(0, INPUTS)
        total, squares = multiply_step(x, norm_ptr, a, cols, inputs, total, squares, IS_HALF, NORM)
        for start in range(begin + INPUTS, end, INPUTS):
            cols = start + tl.arange(0, INPUTS)
            some_x = load_x(x_rows, cols, (rows[:, None] < num_rows) & (cols < inputs)[None, :], inputs, GATED)
            some_a = load_a(a_ptr, inside, cols, inputs)
            total, squares = multiply_step(some_x, norm_ptr, some_a, cols, inputs, total, squares, IS_HALF, NORM)
        at = rows[:, None].to(tl.int64) * numbers + number[None, :]
        tl.store(h_ptr + at, total, mask=(rows[:, None] < num_rows) & inside[None, :])
        if NORM:
            tl.store(squares_ptr + rows, squares, mask=rows < num_rows)


@triton.jit
def locate(item, num_numbers, splits, padded_rank, NUMBERS: tl.constexpr):
    """The tile of an item, the part and rank of its numbers [NUMBERS], and its split."""
    split, rest = item % splits, item // splits
    number = rest % num_numbers * NUMBERS + tl.arange(0, NUMBERS)
    return rest // num_numbers, number // padded_rank, number % padded_rank, split


@triton.jit
def load_item(
    item, last, rows_ptr, owners_ptr, arena_ptr, offsets_ptr, ranks_ptr, own_ptr, num_rows, steps, splits, num_numbers,
    inputs, parts, padded_rank, place_stride,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr,
    INPUTS: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """All of an item that no kernel of the step's layers writes; from `last` on nothing is there.

    Its split and rows, where each row of A begins, whether A has it and its number between the products, and A's first
    inputs.
    """
    tile, part, rank, split = locate(item, num_numbers, splits, padded_rank, NUMBERS)
    place, rows = load_tile(rows_ptr, owners_ptr, tile, item < last, num_rows, TILE, ROWS)
    exists = part < tl.where(place >= 0, parts, 0)
    a_ptr, inside, first = find_a(
        arena_ptr, offsets_ptr, ranks_ptr, own_ptr, place * place_stride + part, rank, exists, inputs,
        OFFSETS, ALIGNED, OWN,
    )  # fmt: skip
    a = load_a(a_ptr, inside, split * steps * INPUTS + tl.arange(0, INPUTS), inputs)
    return split, rows, a_ptr, inside, part * padded_rank + first + rank, a


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "steps", "splits"])
def shrink_kernel(
    x_ptr, norm_ptr, rows_ptr, owners_ptr, places_ptr, arena_ptr, offsets_ptr, ranks_ptr, own_ptr, h_ptr, squares_ptr,
    num_rows, num_tiles, steps, splits, num_numbers, x_stride, inputs, parts, padded_rank, rows_of_x,
    rows_of_place, place_stride,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr,
    INPUTS: tl.constexpr, OWN: tl.constexpr, EXPERTS: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    EARLY: tl.constexpr, BEHIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # BEHIND: the kernel before wrote none of what is read here, and let this one begin when all before it had ended
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    item, last = own_items(owners_ptr, num_tiles, num_numbers * splits)
    numbers = parts * padded_rank
    h_split = tl.cast(num_rows, tl.int64) * numbers
    if EXPERTS:
        while item < last:
            tile, part, rank, split = locate(item, num_numbers, splits, padded_rank, NUMBERS)
            expert, rows = load_tile(rows_ptr, owners_ptr, tile, True, num_rows, TILE, ROWS)
            places = tl.load(places_ptr + rows // rows_of_place, mask=rows < num_rows, other=-1)
            place = tl.max(places, 0).to(tl.int64)
            begin = split * steps * INPUTS
            end, cols = tl.minimum(begin + steps * INPUTS, inputs), begin + tl.arange(0, INPUTS)
            while place >= 0:
                own = tl.where(places == place, rows, num_rows)
                a_ptr, inside, first = find_a(
                    arena_ptr, offsets_ptr, ranks_ptr, own_ptr, place * place_stride + expert * parts + part, rank,
                    part < parts, inputs, OFFSETS, ALIGNED, OWN,
                )  # fmt: skip
                x_rows = x_ptr + (own[:, None] // rows_of_x).to(tl.int64) * x_stride
                read = tl.where(tl.max(inside.to(tl.int32), 0) > 0, inputs, 0)
                x = load_x(x_rows, cols, (own[:, None] < num_rows) & (cols < read)[None, :], inputs, GATED)
                a = load_a(a_ptr, inside, cols, inputs)
                shrink_rows(
                    x_rows, norm_ptr, h_ptr + split * h_split, squares_ptr, own, x, a_ptr, inside,
                    part * padded_rank + first + rank, a, begin, end, num_rows, inputs, numbers, INPUTS, NORM, GATED,
                )  # fmt: skip
                places = tl.where(places == place, -1, places)
                place = tl.max(places, 0).to(tl.int64)
            item += 1
    else:
        split, rows, a_ptr, inside, number, a = load_item(
            item, last, rows_ptr, owners_ptr, arena_ptr, offsets_ptr, ranks_ptr, own_ptr, num_rows, steps, splits,
            num_numbers, inputs, parts, padded_rank, place_stride,
            OFFSETS, ALIGNED, TILE, ROWS, NUMBERS, INPUTS, OWN,
        )  # fmt: skip
        if PDL and EARLY and not BEHIND:
            wait_for_work(item < last)
        for following in tl.range(item + 1, last + 1, num_stages=1):
            begin = split * steps * INPUTS
            end, cols = tl.minimum(begin + steps * INPUTS, inputs), begin + tl.arange(0, INPUTS)
            x_rows = x_ptr + (rows[:, None] // rows_of_x).to(tl.int64) * x_stride
            x = load_x(x_rows, cols, (rows[:, None] < num_rows) & (cols < inputs)[None, :], inputs, GATED)
            next_split, next_rows, next_ptr, next_inside, next_number, next_a = load_item(
                following, last, rows_ptr, owners_ptr, arena_ptr, offsets_ptr, ranks_ptr, own_ptr, num_rows, steps,
                splits, num_numbers, inputs, parts, padded_rank, place_stride,
                OFFSETS, ALIGNED, TILE, ROWS, NUMBERS, INPUTS, OWN,
            )  # fmt: skip
            shrink_rows(
                x_rows, norm_ptr, h_ptr + split * h_split, squares_ptr + split * num_rows, rows, x, a_ptr, inside,
                number, a, begin, end, num_rows, inputs, numbers, INPUTS, NORM, GATED,
            )  # fmt: skip
            split, rows, a_ptr = next_split, next_rows, next_ptr
            inside, number, a = next_inside, next_number, next_a
    if PDL and BEHIND:
        wait_for_work(item < 0)  # only the first one waits, so that this kernel ends behind the one before
