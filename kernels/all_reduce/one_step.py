"""Sums over ranks in one step: each rank sends its whole part to every other rank."""

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
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl


@triton.jit(do_not_specialize=["rank", "num_rows", "most_polls"])
def _one_step_kernel(
    part_ptr, residual_ptr, sum_ptr, weight_ptr, out_ptr, addresses_ptr, num_sums_ptr, failed_ptr, reported_ptr,
    rank, num_rows, size, num_elements, half_elements, most_elements, residual_stride, sum_stride, eps, most_polls,
    SIZE: tl.constexpr, NORM: tl.constexpr, TILE: tl.constexpr, LEAD: tl.constexpr, MOST: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # program i: rows i, i + programs and so on. It sends LEAD rows before it waits for the first
    BITS: tl.constexpr = tl.int16 if part_ptr.dtype.element_ty.primitive_bitwidth == 16 else tl.int32
    cols = tl.arange(0, TILE)
    weight, half, polls = begin_sum(
        weight_ptr, cols, size, num_sums_ptr, failed_ptr, most_polls, NORM, MOST, PDL
    )  # fmt: skip
    first, step = tl.program_id(0), tl.num_programs(0)
    own = buffer_of(addresses_ptr, rank, half, half_elements, BITS)
    for row in range(first, num_rows + LEAD * step, step):
        if row < num_rows:
            at = row * size + cols
            inside = (cols < size) & (at < num_elements)
            bits = to_bits(tl.load(part_ptr + at, mask=inside, other=0.0))
            for peer in tl.static_range(SIZE):
                if peer != rank:
                    place = buffer_of(addresses_ptr, peer, half, half_elements, BITS) + rank * most_elements
                    tl.store(place + at, bits, mask=inside)
        taken = row - LEAD * step
        if taken >= 0:
            at = taken * size + cols
            inside = (cols < size) & (at < num_elements)
            own_bits = to_bits(tl.load(part_ptr + at, mask=inside, other=0.0))
            residual = load_for_norm(residual_ptr + taken * residual_stride + cols, inside, NORM)
            total = tl.zeros([TILE], tl.float32)
            for peer in tl.static_range(SIZE):
                bits = own_bits
                if peer != rank:
                    bits, polls = take(own + peer * most_elements + at, inside, polls, failed_ptr, reported_ptr)
                total += bits.to(part_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
            to_sum = sum_ptr + taken * sum_stride + cols
            total = total.to(part_ptr.dtype.element_ty)
            finish_row(total, residual, to_sum, weight, out_ptr, at, inside, size, eps, NORM)


def one_step(part: Tensor, buffers: PeerBuffers, tiles: RowTiles) -> None:
    """Launches the sum. See `sum_ranks` and `sum_add_rms_norm`, which check the shapes."""
    pdl = supports_pdl(part.device)
    _one_step_kernel[(tiles.programs,)](
        part, tiles.residual, tiles.total, tiles.weight, tiles.out, buffers.addresses, buffers.num_sums,
        buffers.failed, buffers.reported, buffers.rank, tiles.num_rows, tiles.size, part.numel(),
        buffers.half_bytes // part.itemsize, buffers.one_step_bytes() // part.itemsize, tiles.residual.stride(0),
        tiles.total.stride(0), tiles.eps, buffers.most_polls, SIZE=buffers.size, NORM=tiles.has_norm, TILE=tiles.tile,
        LEAD=tiles.lead, MOST=MOST_PROGRAMS, PDL=pdl, num_warps=tiles.num_warps, **pdl_options(pdl),
    )  # fmt: skip
