"""The products of adapters of a few rows, without tensor cores: each row is a tile of its own, and sums are in float32.

What no kernel of a step writes is loaded before the wait for the kernel that runs before: the tables, then A or B. So
behind the wait a program of the first kernel waits for its inputs alone, and one of the second for what it adds up.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.lora.adapter_table import ALIGNED, OFFSETS, AdapterTable
from blockyard.kernels.lora.shrink import a_rows
from blockyard.kernels.programmatic_launch import pdl_options

_SPLITS = 32  # programs among which the inputs are split, at most
_NUMBERS = 16  # between the products, of a program
_INPUTS = 128, 512  # of a program at a time, at least and at most
_OUTPUTS, _RANKS = 64, 32  # of a program, and numbers of their rows of B that are loaded before the wait
_WIDE = 8  # elements of a wide load


@triton.jit
def _input(x_ptr, cols, inputs, end, GATED: tl.constexpr):
    """Some inputs of a row in float32; GATED: silu(gate) * up, rounded, which the row has side by side."""
    x = tl.load(x_ptr + cols, mask=cols < end, other=0.0)
    if GATED:
        gate = x.to(tl.float32)
        up = tl.load(x_ptr + inputs + cols, mask=cols < end, other=0.0)
        x = (gate / (1 + tl.exp(-gate)) * up).to(x.dtype)
    return x.to(tl.float32)


@triton.jit(do_not_specialize=["steps", "splits"])
def shrink_few_kernel(
    x_ptr, norm_ptr, places_ptr, arena_ptr, offsets_ptr, ranks_ptr, h_ptr, squares_ptr, steps, splits, x_stride,
    inputs, parts, max_rank, padded_rank, place_stride,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, NUMBERS: tl.constexpr, INPUTS: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, n, s): row i, tile n of the numbers between the products of all parts, split s of the inputs
    if PDL:
        gdc_launch_dependents()
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    number = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    part, rank = number // padded_rank, number % padded_rank
    place = tl.load(places_ptr + row).to(tl.int64)
    entry, exists = tl.maximum(place, 0) * place_stride + part, part < tl.where(place >= 0, parts, 0)
    a_ptr, inside, _first = a_rows(
        arena_ptr, offsets_ptr, ranks_ptr, ranks_ptr, entry, rank, exists, inputs, OFFSETS, ALIGNED, False
    )
    begin = split * steps * INPUTS
    end = tl.minimum(begin + steps * INPUTS, inputs)
    cols = begin + tl.arange(0, INPUTS)
    a = tl.load(a_ptr[:, None] + cols[None, :], mask=inside[:, None] & (cols < end)[None, :], other=0.0)
    if PDL:
        gdc_wait()
    if tl.max(inside.to(tl.int32), 0) == 0:
        return
    total, squares = tl.zeros([NUMBERS, INPUTS], tl.float32), tl.zeros([INPUTS], tl.float32)
    for start in range(begin, end, INPUTS):
        cols = start + tl.arange(0, INPUTS)
        x = _input(x_ptr + row * x_stride, cols, inputs, end, GATED)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + cols, mask=cols < end, other=0.0).to(tl.float32)
        total += a.to(tl.float32) * x[None, :]
        cols += INPUTS
        a = tl.load(a_ptr[:, None] + cols[None, :], mask=inside[:, None] & (cols < end)[None, :], other=0.0)
    h_ptr += ((row * parts + part) * splits + split) * max_rank + rank
    tl.store(h_ptr, tl.sum(total, 1), mask=inside)
    if NORM:  # the same in all programs of these inputs
        tl.store(squares_ptr + row * splits + split, tl.sum(squares, 0))


@triton.jit
def _b_rows(b_ptr, cols, size, rank, begin, RANKS: tl.constexpr, WIDE: tl.constexpr):
    """Rows of B [OUTPUTS, RANKS], their numbers from `begin` on; WIDE divides the rank."""
    pitch, ranks = rank // WIDE * WIDE, begin + tl.arange(0, RANKS)
    at = b_ptr + cols.to(tl.int64)[:, None] * pitch + ranks[None, :]
    return tl.load(at, mask=(cols < size)[:, None] & (ranks < pitch)[None, :], other=0.0)


@triton.jit
def _times_b(b, h_ptr, factor, rank, begin, splits, max_rank, RANKS: tl.constexpr, SPLITS: tl.constexpr):
    """The products of rows of B with what the splits have together, rounded as B is."""
    ranks, split = begin + tl.arange(0, RANKS), tl.arange(0, SPLITS)
    known = (split < splits)[:, None] & (ranks < rank)[None, :]
    h = tl.sum(tl.load(h_ptr + split[:, None] * max_rank + ranks[None, :], mask=known, other=0.0), 0) * factor
    return tl.sum(b.to(tl.float32) * h.to(b.dtype).to(tl.float32)[None, :], 1)


@triton.jit(do_not_specialize=["splits"])
def expand_few_kernel(
    h_ptr, squares_ptr, places_ptr, arena_ptr, offsets_ptr, ranks_ptr, starts_ptr, sizes_ptr, out_ptr, splits,
    out_stride, parts, max_rank, tiles_of_part, place_stride, inputs, eps,
    OFFSETS: tl.constexpr, ALIGNED: tl.constexpr, OUTPUTS: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr,
    WIDE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): row i, tile j of the outputs of all parts
    if PDL:
        gdc_launch_dependents()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1) // tiles_of_part
    cols = tl.program_id(1) % tiles_of_part * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.load(places_ptr + row).to(tl.int64)
    start, size = tl.load(starts_ptr + part), tl.load(sizes_ptr + part)
    entry = tl.maximum(place, 0) * place_stride + part
    rank = tl.where(place >= 0, tl.load(ranks_ptr + entry), 0)
    bias_at = tl.where(place >= 0, tl.load(offsets_ptr + entry * OFFSETS + 2), -1)
    b_ptr = arena_ptr + tl.multiple_of(tl.load(offsets_ptr + entry * OFFSETS + 1), ALIGNED)
    if rank % WIDE == 0:
        b = _b_rows(b_ptr, cols, size, rank, 0, RANKS, WIDE)
    else:
        b = _b_rows(b_ptr, cols, size, rank, 0, RANKS, 1)
    total = tl.load(arena_ptr + bias_at + cols, mask=cols < tl.where(bias_at >= 0, size, 0), other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if (rank == 0) & (bias_at < 0):
        return
    target = out_ptr + row * out_stride + start + cols
    before = tl.load(target, mask=cols < size, other=0.0).to(tl.float32)
    if rank > 0:
        factor = 1.0
        if NORM:
            split = tl.arange(0, SPLITS)
            squares = tl.load(squares_ptr + row * splits + split, mask=split < splits, other=0.0)
            factor = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
        h_ptr += (row * parts + part) * splits * max_rank
        total += _times_b(b, h_ptr, factor, rank, 0, splits, max_rank, RANKS, SPLITS)
        for begin in range(RANKS, rank, RANKS):
            b = _b_rows(b_ptr, cols, size, rank, begin, RANKS, 1)
            total += _times_b(b, h_ptr, factor, rank, begin, splits, max_rank, RANKS, SPLITS)
    tl.store(target, (before + total).to(out_ptr.dtype.element_ty), mask=cols < size)


def add_to_few_rows(
    x: Tensor, places: Tensor, table: AdapterTable, out: Tensor, norm: RMSNorm | None, *, gated: bool, pdl: bool
) -> None:
    """See `add_adapters`, of which this is a part: each row has a place, and one GPU has all of A. Places are read
    before the kernel launched last has ended."""
    (rows, width), parts = x.shape, table.num_parts
    inputs, padded = width // (2 if gated else 1), ceil_div(table.max_rank, _NUMBERS) * _NUMBERS
    in_tile = min(max(next_power_of_2(ceil_div(inputs, _SPLITS)), _INPUTS[0]), _INPUTS[1])
    steps = ceil_div(inputs, in_tile * _SPLITS)
    splits, of_part = ceil_div(inputs, in_tile * steps), ceil_div(table.largest, _OUTPUTS)
    h = torch.empty((rows, parts, splits, table.max_rank), dtype=torch.float32, device=x.device)
    squares = h if norm is None else torch.empty((rows, splits), dtype=torch.float32, device=x.device)
    facts = {"OFFSETS": OFFSETS, "ALIGNED": ALIGNED, "NORM": norm is not None, "PDL": pdl, **pdl_options(pdl)}
    shrink_few_kernel[rows, ceil_div(parts * padded, _NUMBERS), splits](
        x, x if norm is None else norm.weight, places, table.arena, table.offsets, table.ranks, h, squares, steps,
        splits, x.stride(0), inputs, parts, table.max_rank, padded, table.place_stride,
        NUMBERS=_NUMBERS, INPUTS=in_tile, GATED=gated, num_warps=8 if in_tile > 2 * _INPUTS[0] else 4, **facts,
    )  # fmt: skip
    expand_few_kernel[rows, parts * of_part](
        h, squares, places, table.arena, table.offsets, table.ranks, table.starts, table.sizes, out, splits,
        out.stride(0), parts, table.max_rank, of_part, table.place_stride, inputs, 0.0 if norm is None else norm.eps,
        OUTPUTS=_OUTPUTS, RANKS=min(next_power_of_2(padded), _RANKS), SPLITS=_SPLITS, WIDE=_WIDE, num_warps=4, **facts,
    )  # fmt: skip
