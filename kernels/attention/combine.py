"""Puts the pieces of a sequence together that `paged_decode` made, on a GPU: in a kernel after it, a program a row and
head, or where rows are many by the program that is the last of a row's and K/V head's to be done."""

import triton
import triton.language as tl

from blockyard.kernels.int_math import next_power_of_2

_COMBINED = 4096  # elements of pieces that the last program takes at once


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["out_ptr"])
def combine_splits_kernel(
    of_row_ptr, partial_ptr, weight_ptr, out_ptr, rows,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    # program (i, j) has head j of row i; none begins early: many programs that wait slow those down that have pieces
    row, head = tl.program_id(0), tl.program_id(1)
    base = tl.load(of_row_ptr + row)
    parts = tl.load(of_row_ptr + rows + row)
    if parts == 1:
        return
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    top = float("-inf")
    mass = 0.0
    total = tl.zeros([DIM], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        place = (base + part).to(tl.int64) * HEADS + head
        weight = tl.load(weight_ptr + place, mask=part < parts, other=float("-inf"))
        values = tl.load(
            partial_ptr + place[:, None] * HEAD_DIM + dims[None, :],
            mask=(part < parts)[:, None] & in_head[None, :],
            other=0.0,
        )
        higher = tl.maximum(top, tl.max(weight, 0))
        fade = tl.exp2(top - higher)
        shares = tl.exp2(weight - higher)
        mass = mass * fade + tl.sum(shares, 0)
        total = total * fade + tl.sum(values * shares[:, None], 0)
        top = higher
    tl.store(out_ptr + (row.to(tl.int64) * HEADS + head) * HEAD_DIM + dims, total / mass, mask=in_head)


@triton.jit
def reduce_if_last(
    row, head, parts, of_row_ptr, arrived_ptr, partial_ptr, weight_ptr, out_ptr, rows,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A piece of a row and K/V head is stored; who says so last puts all of them together, PARTS at a time."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    arrived = arrived_ptr + head * rows + row
    tl.debug_barrier()  # all of this program's stores before the word that they are there
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.debug_barrier()
        base = tl.load(of_row_ptr + row)
        group, dims = tl.arange(0, triton.next_power_of_2(GROUP)), tl.arange(0, DIM)
        heads, in_head = head * GROUP + group, dims < HEAD_DIM
        top = tl.full(heads.shape, float("-inf"), tl.float32)
        mass = tl.zeros(heads.shape, tl.float32)
        total = tl.zeros([heads.shape[0], DIM], tl.float32)
        for start in range(0, parts, PARTS):
            part = start + tl.arange(0, PARTS)
            place = (base + part).to(tl.int64)[:, None] * HEADS + heads[None, :]
            known = (part < parts)[:, None] & (group < GROUP)[None, :]
            weight = tl.load(weight_ptr + place, mask=known, other=float("-inf"), cache_modifier=".cg")
            inside = known[:, :, None] & in_head[None, None, :]
            places = partial_ptr + place[:, :, None] * HEAD_DIM + dims[None, None, :]
            values = tl.load(places, mask=inside, other=0.0, cache_modifier=".cg")
            higher = tl.maximum(tl.maximum(top, tl.max(weight, 0)), -3e38)  # heads that pad have no weight
            fade = tl.exp2(top - higher)
            shares = tl.exp2(weight - higher[None, :])
            mass = mass * fade + tl.sum(shares, 0)
            total = total * fade[:, None] + tl.sum(values * shares[:, :, None], 0)
            top = higher
        total = total / tl.where(mass > 0, mass, 1.0)[:, None]
        columns = (row * HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out_ptr + columns, total, mask=(group < GROUP)[:, None] & in_head[None, :])
        tl.store(arrived, 0)


def splits_at_once(group: int, dim: int) -> int:
    return max(_COMBINED // (dim * next_power_of_2(group)), 1)
