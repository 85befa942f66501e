"""Sums over ranks in two steps: each rank adds the parts of its share of rows, and sends the sums to all others."""

import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.all_reduce.exchange import (
    begin_sum,
    buffer_of,
    finish_row,
    load_for_norm,
    take,
    to_bits,
)
from blockyard.kernels.all_reduce.peer_buffers import MOST_PROGRAMS, PeerBuffers
from blockyard.kernels.all_reduce.row_tiles import RowTiles
from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl


@triton.jit
def _send_parts(
    part_ptr, addresses_ptr, rank, half, half_elements, first, size, num_elements, cols,
    SIZE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    # first: number of the group's first element
    for peer in tl.static_range(SIZE):
        if peer != rank:
            at = first + peer * size + cols
            bits = to_bits(tl.load(part_ptr + at, mask=(cols < size) & (at < num_elements), other=0.0))
            place = buffer_of(addresses_ptr, peer, half, half_elements, BITS) + first + rank * size + cols
            tl.store(place, bits, mask=(cols < size) & (at < num_elements))


@triton.jit
def _send_sum(
    part_ptr, addresses_ptr, own, rank, half, half_elements, most_elements, first, size, num_elements, cols, polls,
    failed_ptr, reported_ptr, SIZE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    at = first + rank * size + cols
    inside = (cols < size) & (at < num_elements)
    own_bits = to_bits(tl.load(part_ptr + at, mask=inside, other=0.0))
    total = tl.zeros(cols.shape, tl.float32)
    for peer in tl.static_range(SIZE):
        bits = own_bits
        if peer != rank:
            bits, polls = take(own + first + peer * size + cols, inside, polls, failed_ptr, reported_ptr)
        total += bits.to(dtype, bitcast=True).to(tl.float32)
    bits = to_bits(total.to(dtype))
    for peer in tl.static_range(SIZE):
        place = buffer_of(addresses_ptr, peer, half, half_elements, BITS) + most_elements
        tl.store(place + at, bits, mask=inside)
    return polls


@triton.jit(do_not_specialize=["rank", "num_rows", "most_polls"])
def _two_step_kernel(
    part_ptr, residual_ptr, sum_ptr, weight_ptr, out_ptr, addresses_ptr, num_sums_ptr, failed_ptr, reported_ptr,
    rank, num_rows, size, num_elements, half_elements, most_elements, residual_stride, sum_stride, eps, most_polls,
    SIZE: tl.constexpr, NORM: tl.constexpr, TILE: tl.constexpr, LEAD: tl.constexpr, MOST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # program i: groups i, i + programs and so on, of SIZE rows, of which each rank adds one. The first half of the
    # elements of a buffer is for parts of the own rows, from each rank, the second for sums
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    BITS: tl.constexpr = tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32
    cols = tl.arange(0, TILE)
    weight, half, polls = begin_sum(
        weight_ptr, cols, size, num_sums_ptr, failed_ptr, most_polls, NORM, MOST, PDL
    )  # fmt: skip
    num_groups, step = tl.cdiv(num_rows, SIZE), tl.num_programs(0)
    own = buffer_of(addresses_ptr, rank, half, half_elements, BITS)
    group_size = size * SIZE
    for group in range(tl.program_id(0), num_groups + 2 * LEAD * step, step):
        if group < num_groups:
            _send_parts(
                part_ptr, addresses_ptr, rank, half, half_elements, group * group_size, size, num_elements, cols,
                SIZE, BITS,
            )  # fmt: skip
        added = group - LEAD * step
        if (added >= 0) & (added < num_groups):
            polls = _send_sum(
                part_ptr, addresses_ptr, own, rank, half, half_elements, most_elements, added * group_size, size,
                num_elements, cols, polls, failed_ptr, reported_ptr, SIZE, BITS,
            )  # fmt: skip
        taken = group - 2 * LEAD * step
        if taken >= 0:
            for peer in tl.static_range(SIZE):
                row = taken * SIZE + peer
                at = row * size + cols
                inside = (cols < size) & (at < num_elements)
                residual = load_for_norm(residual_ptr + row * residual_stride + cols, inside, NORM)
                bits, polls = take(own + most_elements + at, inside, polls, failed_ptr, reported_ptr)
                total = bits.to(dtype, bitcast=True)
                to_sum = sum_ptr + row * sum_stride + cols
                finish_row(total, residual, to_sum, weight, out_ptr, at, inside, size, eps, NORM)


def two_step(part: Tensor, buffers: PeerBuffers, tiles: RowTiles) -> None:
    """Launches the sum. See `sum_ranks` and `sum_add_rms_norm`, which check the shapes."""
    pdl = supports_pdl(part.device)
    programs = min(ceil_div(tiles.num_rows, buffers.size), tiles.programs)
    _two_step_kernel[(programs,)](
        part, tiles.residual, tiles.total, tiles.weight, tiles.out, buffers.addresses, buffers.num_sums,
        buffers.failed, buffers.reported, buffers.rank, tiles.num_rows, tiles.size, part.numel(),
        buffers.half_bytes // part.itemsize, buffers.two_step_bytes() // part.itemsize, tiles.residual.stride(0),
        tiles.total.stride(0), tiles.eps, buffers.most_polls, SIZE=buffers.size, NORM=tiles.has_norm, TILE=tiles.tile,
        LEAD=tiles.lead, MOST=MOST_PROGRAMS, PDL=pdl, num_warps=tiles.num_warps, **pdl_options(pdl),
    )  # fmt: skip
