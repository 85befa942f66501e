"""The products of adapters on a GPU: `shrink` to the rank, `expand` to the outputs, each row with its own adapter.

A program computes for one row, so that any mixture of adapters in a step is one launch, also in a CUDA graph that knows
neither the adapters nor their ranks. Rows that follow each other with the same adapter read its matrices from L2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.lora.adapter_table import OFFSETS, AdapterTable, Between
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_RANKS = 16  # of a tile
_INPUTS = 256
_OUTPUTS = 128


@triton.jit
def shrink_kernel(
    x_ptr, places_ptr, arena_ptr, offsets_ptr, ranks_ptr, own_ptr, h_ptr, x_stride, inputs, parts, max_rank,
    OFFSETS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr, OWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, p, t): ranks of tile t, of part p, of row i; with OWN only those that A has
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places_ptr + row).to(tl.int64)
    if place < 0:
        return
    entry = place * parts + part
    own_first = 0
    if OWN:
        own_first, rank = tl.load(own_ptr + entry * 2), tl.load(own_ptr + entry * 2 + 1)
    else:
        rank = tl.load(ranks_ptr + entry)
    first = tl.program_id(2) * RANKS
    if first >= rank:
        return
    ranks = first + tl.arange(0, RANKS)
    a_ptr = arena_ptr + tl.load(offsets_ptr + entry * OFFSETS)
    total = tl.zeros([RANKS], tl.float32)
    for begin in range(0, inputs, INPUTS):
        cols = begin + tl.arange(0, INPUTS)
        x = tl.load(x_ptr + row * x_stride + cols, mask=cols < inputs, other=0.0).to(tl.float32)
        inside = (ranks[:, None] < rank) & (cols[None, :] < inputs)
        a = tl.load(a_ptr + ranks[:, None].to(tl.int64) * inputs + cols[None, :], mask=inside, other=0.0)
        total += tl.sum(a.to(tl.float32) * x[None, :], axis=1)
    tl.store(h_ptr + (row * parts + part) * max_rank + own_first + ranks, total, mask=ranks < rank)


@triton.jit
def expand_kernel(
    h_ptr, places_ptr, arena_ptr, offsets_ptr, ranks_ptr, starts_ptr, sizes_ptr, out_ptr, out_stride, parts, max_rank,
    OFFSETS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, p, t): outputs of tile t, of part p, of row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(places_ptr + row).to(tl.int64)
    if place < 0:
        return
    entry = place * parts + part
    rank, size = tl.load(ranks_ptr + entry), tl.load(sizes_ptr + part)
    bias_at = tl.load(offsets_ptr + entry * OFFSETS + 2)
    first = tl.program_id(2) * OUTPUTS
    if first >= size:
        return
    if (rank == 0) & (bias_at < 0):
        return
    cols = first + tl.arange(0, OUTPUTS)
    b_ptr = arena_ptr + tl.load(offsets_ptr + entry * OFFSETS + 1)
    total = tl.zeros([OUTPUTS], tl.float32)
    for begin in range(0, rank, RANKS):
        ranks = begin + tl.arange(0, RANKS)
        h = tl.load(h_ptr + (row * parts + part) * max_rank + ranks, mask=ranks < rank, other=0.0)
        inside = (cols[:, None] < size) & (ranks[None, :] < rank)
        b = tl.load(b_ptr + cols[:, None].to(tl.int64) * rank + ranks[None, :], mask=inside, other=0.0)
        total += tl.sum(b.to(tl.float32) * h[None, :], axis=1)
    if bias_at >= 0:
        total += tl.load(arena_ptr + bias_at + cols, mask=cols < size, other=0.0).to(tl.float32)
    target = out_ptr + row * out_stride + tl.load(starts_ptr + part) + cols
    total += tl.load(target, mask=cols < size, other=0.0).to(tl.float32)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=cols < size)


def add_adapters(x: Tensor, places: Tensor, table: AdapterTable, out: Tensor, between: Between | None = None) -> None:
    """Adds the products of adapters to out [rows, outputs], in place.

    x [rows, in], places [rows] int32, below 0: a row has no adapter. Rows may be strided. Places and ranks must fit the
    table: not checked on the device. Raises ValueError for other shapes. between: adds what several GPUs have between
    the two products, [rows, parts, max_rank] float32; None: this one has all.
    """
    table.check(x, places, out)
    rows, inputs = x.shape
    if not rows or not table.num_parts:
        return
    make = torch.empty if between is None else torch.zeros  # of numbers that other GPUs have, it adds zeros
    h = make((rows, table.num_parts, table.max_rank), dtype=torch.float32, device=x.device)
    has_own, own = table.own_ranks is not None, table.ranks if table.own_ranks is None else table.own_ranks
    pdl = supports_pdl(x.device)
    shrink_kernel[rows, table.num_parts, ceil_div(table.max_rank, _RANKS)](
        x, places, table.arena, table.offsets, table.ranks, own, h, x.stride(0), inputs, table.num_parts,
        table.max_rank,
        OFFSETS=OFFSETS, RANKS=_RANKS, INPUTS=_INPUTS, OWN=has_own, PDL=pdl, **pdl_options(pdl),
    )  # fmt: skip
    if between is not None:
        h = between(h)
    expand_kernel[rows, table.num_parts, ceil_div(table.largest, _OUTPUTS)](
        h, places, table.arena, table.offsets, table.ranks, table.starts, table.sizes, out, out.stride(0),
        table.num_parts, table.max_rank,
        OFFSETS=OFFSETS, RANKS=_RANKS, OUTPUTS=_OUTPUTS, PDL=pdl, **pdl_options(pdl),
    )  # fmt: skip
