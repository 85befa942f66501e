"""Both products of adapters where a step has few rows: a program has one row, and needs neither tiles nor tensor cores.

What no kernel of the step's layers writes is loaded before a program waits for the kernel before: places, the table,
and A or B. Behind the wait are only the inputs or h, the sums and the store. `add_adapters` launches both.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.lora.expand import load_b, load_entry
from blockyard.kernels.lora.shrink import find_a, load_a
from blockyard.kernels.programmatic_launch import wait_for_work


@triton.jit
def load_row(x_ptr, cols, inputs, GATED: tl.constexpr):
    """Inputs [INPUTS] float32 of a row; GATED: silu(gate) * up, which it has side by side."""
    x = tl.load(x_ptr + cols, mask=cols < inputs, other=0.0)
    if GATED:
        gate = x.to(tl.float32)
        up = tl.load(x_ptr + inputs + cols, mask=cols < inputs, other=0.0)
        x = (gate / (1 + tl.exp(-gate)) * up).to(x.dtype)
    return x.to(tl.float32)


@triton.jit
def times_a(a, x, norm, NORM: tl.constexpr):
    """The products [NUMBERS] of A and some inputs, and the sum of squares of these."""
    squares = 0.0
    if NORM:
        squares = tl.sum(x * x, 0)
        x *= norm
    return tl.sum(a.to(tl.float32) * x[None, :], 1), squares


@triton.jit
def load_norm(norm_ptr, cols, inputs, NORM: tl.constexpr):
    return tl.load(norm_ptr + cols, mask=cols < inputs, other=0.0).to(tl.float32) if NORM else 1.0


@triton.jit(do_not_specialize=["num_rows", "steps"])
def shrink_row_kernel(
    x_ptr, norm_ptr, places_ptr, arena_ptr, offsets_ptr, ranks_ptr, own_ptr, h_ptr, squares_ptr, num_rows, steps,
    x_stride, inputs, parts, padded_rank, place_stride,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, NUMBERS: tl.constexpr, INPUTS: tl.constexpr, OWN: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (r, n, s): row r, tile n of the numbers between the products of all parts, split s of the inputs
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    number = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    part, rank = number // padded_rank, number % padded_rank
    place = tl.load(places_ptr + row).to(tl.int64)
    exists = part < tl.where(place >= 0, parts, 0)
    a_ptr, inside, first = find_a(
        arena_ptr, offsets_ptr, ranks_ptr, own_ptr, place * place_stride + part, rank, exists, inputs,
        OFFSETS, ALIGNED, OWN,
    )  # fmt: skip
    begin = split * steps * INPUTS
    cols = begin + tl.arange(0, INPUTS)
    a, norm = load_a(a_ptr, inside, cols, inputs), load_norm(norm_ptr, cols, inputs, NORM)
    is_needed = tl.max(inside.to(tl.int32), 0) > 0
    if PDL and EARLY:
        wait_for_work(is_needed)
    if is_needed:
        x_ptr += row * x_stride
        total, squares = times_a(a, load_row(x_ptr, cols, inputs, GATED), norm, NORM)
        for start in range(begin + INPUTS, tl.minimum(begin + steps * INPUTS, inputs), INPUTS):
            cols = start + tl.arange(0, INPUTS)
            a, norm = load_a(a_ptr, inside, cols, inputs), load_norm(norm_ptr, cols, inputs, NORM)
            more, more_squares = times_a(a, load_row(x_ptr, cols, inputs, GATED), norm, NORM)
            total, squares = total + more, squares + more_squares
        of_row = (split * num_rows + row) * parts * padded_rank
        tl.store(h_ptr + of_row + part * padded_rank + first + rank, total, mask=inside)
        if NORM:
            tl.store(squares_ptr + split * num_rows + row, squares)


@triton.jit
def times_b(h_ptr, b, factor, ranks, rank, splits, h_split, SPLITS: tl.constexpr, ALIGNED: tl.constexpr):
    """The products [OUTPUTS] of a row of h, added up over its splits and times factor, with columns of B."""
    split = tl.arange(0, SPLITS)
    inside = (split < splits)[:, None] & (ranks < tl.cdiv(rank, ALIGNED) * ALIGNED)[None, :]
    parts = tl.load(h_ptr + split.to(tl.int64)[:, None] * h_split + ranks[None, :], mask=inside, other=0.0)
    h = tl.sum(tl.where((ranks < rank)[None, :], parts, 0.0), 0) * factor  # what is beyond was never written
    return tl.sum(b.to(tl.float32) * h[None, :], 1)


@triton.jit
def inverse_length(squares_ptr, inputs, eps, splits, num_rows, SPLITS: tl.constexpr):
    """What an RMSNorm multiplies a row with, of the sums of squares of its splits."""
    split = tl.arange(0, SPLITS)
    squares = tl.load(squares_ptr + split * num_rows, mask=split < splits, other=0.0)
    return tl.rsqrt(tl.sum(squares, 0) / inputs + eps)


@triton.jit(do_not_specialize=["num_rows", "splits"])
def expand_row_kernel(
    h_ptr, squares_ptr, places_ptr, arena_ptr, offsets_ptr, ranks_ptr, starts_ptr, sizes_ptr, out_ptr, num_rows,
    splits, out_stride, parts, padded_rank, tiles_of_part, place_stride, inputs, eps,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, OUTPUTS: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr,
    WIDE: tl.constexpr, OUTPUTS_ALIGNED: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (r, j): row r, tile j of the outputs of all parts
    if PDL:
        gdc_launch_dependents()
        if not EARLY:
            gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1) // tiles_of_part
    cols, ranks = tl.program_id(1) % tiles_of_part * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, RANKS)
    place = tl.load(places_ptr + row).to(tl.int64)
    start = tl.multiple_of(tl.load(starts_ptr + part), OUTPUTS_ALIGNED)
    size = tl.multiple_of(tl.load(sizes_ptr + part), OUTPUTS_ALIGNED)
    rank, b_ptr, bias_at = load_entry(
        arena_ptr, offsets_ptr, ranks_ptr, place * place_stride + part, place >= 0, OFFSETS, ALIGNED
    )
    b = load_b(b_ptr, cols, size, ranks, rank, WIDE)
    inside = cols < size
    bias = tl.load(arena_ptr + bias_at + cols, mask=cols < tl.where(bias_at >= 0, size, 0), other=0.0).to(tl.float32)
    is_needed = ((rank > 0) | (bias_at >= 0)) & (tl.program_id(1) % tiles_of_part * OUTPUTS < size)
    if PDL and EARLY:
        wait_for_work(is_needed)
    if is_needed:
        target = out_ptr + row * out_stride + start + cols
        out = tl.load(target, mask=inside, other=0.0)
        factor = 1.0
        if NORM:
            factor = inverse_length(squares_ptr + row, inputs, eps, tl.where(rank > 0, splits, 0), num_rows, SPLITS)
        h_ptr += row * parts * padded_rank + part * padded_rank
        h_split = tl.cast(num_rows, tl.int64) * parts * padded_rank
        total = times_b(h_ptr, b, factor, ranks, rank, splits, h_split, SPLITS, ALIGNED) + bias
        for begin in range(RANKS, rank, RANKS):
            others = begin + ranks
            more = load_b(b_ptr, cols, size, others, rank, WIDE)
            total += times_b(h_ptr, more, factor, others, rank, splits, h_split, SPLITS, ALIGNED)
        tl.store(target, (total + out.to(tl.float32)).to(out.dtype), mask=inside)
