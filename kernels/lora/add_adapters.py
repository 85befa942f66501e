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
from blockyard.kernels.tensor_checks import check_tensor

_RANKS = 16  # of a tile
_INPUTS = 256
_OUTPUTS = 128


@triton.jit
def find_entry(
    places_ptr, experts_ptr, pair, part, pairs_of_row, parts, place_stride, place_size, arena_ptr, EXPERTS: tl.constexpr
):  # fmt: skip
    """The place of a pair's row, the index of its entry, and where the memory of the place begins.

    The place is below 0 if the pair's expert is none of so many.
    """
    place = tl.load(places_ptr + pair // pairs_of_row).to(tl.int64)
    entry = place * place_stride + part
    if EXPERTS:
        expert = tl.load(experts_ptr + pair).to(tl.int64)
        entry += expert * parts
        place = tl.where((expert >= 0) & (expert < EXPERTS), place, -1)
    return place, entry, arena_ptr + place * place_size


@triton.jit
def shrink_kernel(
    x_ptr, places_ptr, experts_ptr, arena_ptr, offsets_ptr, ranks_ptr, own_ptr, h_ptr, x_stride, inputs, parts,
    max_rank, pairs_of_x, pairs_of_row, place_stride, place_size,
    OFFSETS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr, OWN: tl.constexpr, EXPERTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # program (i, p, t): ranks of tile t, of part p, of pair i, which without experts is row i; with OWN only those
    # that A has
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, entry, arena_ptr = find_entry(
        places_ptr, experts_ptr, pair, part, pairs_of_row, parts, place_stride, place_size, arena_ptr, EXPERTS
    )
    if place < 0:
        return
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
    x_ptr += pair // pairs_of_x * x_stride
    total = tl.zeros([RANKS], tl.float32)
    for begin in range(0, inputs, INPUTS):
        cols = begin + tl.arange(0, INPUTS)
        x = tl.load(x_ptr + cols, mask=cols < inputs, other=0.0).to(tl.float32)
        inside = (ranks[:, None] < rank) & (cols[None, :] < inputs)
        a = tl.load(a_ptr + ranks[:, None].to(tl.int64) * inputs + cols[None, :], mask=inside, other=0.0)
        total += tl.sum(a.to(tl.float32) * x[None, :], axis=1)
    tl.store(h_ptr + (pair * parts + part) * max_rank + own_first + ranks, total, mask=ranks < rank)


@triton.jit
def expand_kernel(
    h_ptr, places_ptr, experts_ptr, weights_ptr, arena_ptr, offsets_ptr, ranks_ptr, starts_ptr, sizes_ptr, out_ptr,
    out_stride, parts, max_rank, pairs_of_row, place_stride, place_size,
    OFFSETS: tl.constexpr, RANKS: tl.constexpr, OUTPUTS: tl.constexpr, EXPERTS: tl.constexpr, WEIGHTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # program (i, p, t): outputs of tile t, of part p, of pair i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place, entry, arena_ptr = find_entry(
        places_ptr, experts_ptr, pair, part, pairs_of_row, parts, place_stride, place_size, arena_ptr, EXPERTS
    )
    if place < 0:
        return
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
        h = tl.load(h_ptr + (pair * parts + part) * max_rank + ranks, mask=ranks < rank, other=0.0)
        inside = (cols[:, None] < size) & (ranks[None, :] < rank)
        b = tl.load(b_ptr + cols[:, None].to(tl.int64) * rank + ranks[None, :], mask=inside, other=0.0)
        total += tl.sum(b.to(tl.float32) * h[None, :], axis=1)
    if bias_at >= 0:
        total += tl.load(arena_ptr + bias_at + cols, mask=cols < size, other=0.0).to(tl.float32)
    if WEIGHTS:
        total *= tl.load(weights_ptr + pair)
    target = out_ptr + pair * out_stride + tl.load(starts_ptr + part) + cols
    total += tl.load(target, mask=cols < size, other=0.0).to(tl.float32)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=cols < size)


def add_adapters(
    x: Tensor,
    places: Tensor,
    table: AdapterTable,
    out: Tensor,
    between: Between | None = None,
    experts: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Adds the products of adapters to out [rows, outputs], in place.

    x [rows, in], places [rows] int32, below 0: a row has no adapter. Rows may be strided. Places, ranks and experts
    must fit the table: not checked on the device. Raises ValueError for other shapes. between: adds what several GPUs
    have between the two products, [rows, parts, max_rank] float32; None: this one has all.

    Of a layer of experts, experts [rows, top_k] int32 are those of each row, a number behind them all for none, out
    [pairs, outputs] has a row for each of them, x is [rows, in] or [pairs, in], and weights [rows, top_k] float32
    multiply what is added; None: nothing does.
    """
    table.check(x, places, out, experts)
    (pairs, inputs), parts = (len(out), x.shape[1]), table.num_parts
    if not pairs or not parts:
        return
    if weights is not None:
        check_tensor("weights", weights, () if experts is None else tuple(experts.shape), torch.float32)
    make = torch.empty if between is None else torch.zeros  # of numbers that other GPUs have, it adds zeros
    h = make((pairs, parts, table.max_rank), dtype=torch.float32, device=x.device)
    has_own, own = table.own_ranks is not None, table.ranks if table.own_ranks is None else table.own_ranks
    chosen, num_experts = (places, 0) if experts is None else (experts, table.num_experts)
    pdl = supports_pdl(x.device)
    shrink_kernel[pairs, parts, ceil_div(table.max_rank, _RANKS)](
        x, places, chosen, table.arena, table.offsets, table.ranks, own, h, x.stride(0), inputs, parts, table.max_rank,
        pairs // len(x), pairs // len(places), table.place_stride, table.place_size,
        OFFSETS=OFFSETS, RANKS=_RANKS, INPUTS=_INPUTS, OWN=has_own, EXPERTS=num_experts, PDL=pdl, **pdl_options(pdl),
    )  # fmt: skip
    if between is not None:
        h = between(h)
    expand_kernel[pairs, parts, ceil_div(table.largest, _OUTPUTS)](
        h, places, chosen, h if weights is None else weights, table.arena, table.offsets, table.ranks, table.starts,
        table.sizes, out, out.stride(0), parts, table.max_rank, pairs // len(places), table.place_stride,
        table.place_size,
        OFFSETS=OFFSETS, RANKS=_RANKS, OUTPUTS=_OUTPUTS, EXPERTS=num_experts, WEIGHTS=weights is not None, PDL=pdl,
        **pdl_options(pdl),
    )  # fmt: skip
