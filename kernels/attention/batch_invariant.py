"""Attention in which a row's result is a function of that row alone, to the last bit; on a GPU.

One kernel for decodes and prefills, with one tile size. Keys are cut at multiples of a fixed length; what a row has of
each split is worked out from nothing and the splits are merged in their order, in one program or, for decodes, by a
second kernel with the same operations. Splits and tiles of which a row sees nothing change nothing to the last bit:
their shares are 0 and what was there before is multiplied by 1.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.attention.prefill_tiles import attention_inner_loop, find_query_tile
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata, check_attention_inputs, check_query_ranges

_LOG2E = 1.4426950408889634
_MOST_SPLITS = 64  # of the longest sequence
_LEAST_SPLIT = 512  # keys


def split_length(longest: int) -> int:
    """Keys of a split where no position is beyond `longest`: it must be the same in all steps."""
    return max(_LEAST_SPLIT, next_power_of_2(ceil_div(longest, _MOST_SPLITS)))


@triton.jit
def _weights(top, other_top):
    """What two parts count in their sum, and the larger top."""
    higher = tl.maximum(top, other_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp2(top - base), tl.exp2(other_top - base), higher


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "starts_ptr", "out_ptr"],
)
def _attend_kernel(
    q_ptr, layer_ptr, slots_ptr, positions_ptr, tables_ptr, starts_ptr, out_ptr, sums_ptr, scales_ptr, q_stride,
    table_stride, num_seqs, scale,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    SPLIT: tl.constexpr, SHARED: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    # program (i, j, k) has K/V head i of tile j from the end; if SHARED splits k, k + programs, ..., else all
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    _, start, row_end, first_line = find_query_tile(starts_ptr, num_seqs, tile, GROUP, ROWS)
    num_lines = (row_end - start) * GROUP
    if first_line >= num_lines:
        return
    slot = tl.load(slots_ptr + start)
    before = tl.load(positions_ptr + start).to(tl.int32)
    lines = first_line + tl.arange(0, ROWS)
    positions = before + lines // GROUP
    end = before + (tl.minimum(first_line + ROWS, num_lines) - 1) // GROUP + 1
    end = tl.where(slot < 0, 0, end)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(before + first_line // GROUP - WINDOW + 1, 0)
    v_scale = 1.0
    if SCALED:
        scale *= tl.load(scales_ptr)
        v_scale = tl.load(scales_ptr + 1)
    dims = tl.arange(0, DIM)
    row = (start + lines // GROUP).to(tl.int64)
    heads = head * GROUP + lines % GROUP
    inside = (lines < num_lines)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    place = (row - tl.load(starts_ptr)) * (KV_HEADS * GROUP) + heads
    table = tables_ptr + slot * table_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    for split in range(begin // SPLIT + tl.program_id(2), tl.cdiv(end, SPLIT), tl.num_programs(2)):
        new_top = tl.full([ROWS], float("-inf"), tl.float32)
        new_mass = tl.zeros([ROWS], tl.float32)
        new_total = tl.zeros([ROWS, DIM], tl.float32)
        new_total, new_mass, new_top = attention_inner_loop(
            q, new_total, new_mass, new_top, positions, split * SPLIT, tl.minimum((split + 1) * SPLIT, end), end, table,
            layer_ptr, head, scale, True, WINDOW, CAP, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
        if SHARED:
            where = place * MOST + split
            tl.store(out_ptr + where[:, None] * HEAD_DIM + dims[None, :], new_total, mask=inside)
            tl.store(sums_ptr + 2 * where, new_mass, mask=lines < num_lines)
            tl.store(sums_ptr + 2 * where + 1, new_top, mask=lines < num_lines)
        else:
            fade, new_fade, top = _weights(top, new_top)
            mass = tl.fma(new_mass, new_fade, mass * fade)
            faded = tl.zeros_like(new_total) + new_fade[:, None]
            total = tl.fma(new_total, faded, total * fade[:, None])
    if not SHARED:
        total = total * (v_scale / tl.where(mass > 0, mass, 1.0))[:, None]
        tl.store(out_ptr + place[:, None] * HEAD_DIM + dims[None, :], total, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "out_ptr"])
def _merge_kernel(
    slots_ptr, positions_ptr, partial_ptr, sums_ptr, scales_ptr, out_ptr,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    SPLIT: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    # program (i, j) has head j of row i, a sequence's only one
    row = tl.program_id(0).to(tl.int64)
    place = row * HEADS + tl.program_id(1)
    end = tl.where(tl.load(slots_ptr + row) < 0, 0, tl.load(positions_ptr + row).to(tl.int32) + 1)
    begin = end * 0
    if WINDOW > 0:
        begin = tl.maximum(end - WINDOW, 0)
    v_scale = 1.0
    if SCALED:
        v_scale = tl.load(scales_ptr + 1)
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    top = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([DIM], tl.float32)
    for split in range(begin // SPLIT, tl.cdiv(end, SPLIT)):
        where = place * MOST + split
        new_total = tl.load(partial_ptr + where * HEAD_DIM + dims, mask=in_head, other=0.0)
        new_mass = tl.load(sums_ptr + 2 * where + tl.arange(0, 1))
        fade, new_fade, top = _weights(top, tl.load(sums_ptr + 2 * where + 1 + tl.arange(0, 1)))
        mass = tl.fma(new_mass, new_fade, mass * fade)
        total = tl.fma(new_total, tl.zeros_like(total) + new_fade, total * fade)
    total = total * (v_scale / tl.where(mass > 0, mass, 1.0))
    tl.store(out_ptr + place * HEAD_DIM + dims, total, mask=in_head)


def batch_invariant_attention(
    q: Tensor,
    layer: Tensor,
    seqs: PagedKVMetadata,
    starts: Tensor,
    scale: float,
    window: int | None,
    longest: int,
    out: Tensor,
    are_decodes: bool,
    soft_cap: float | None = None,
    scales: Tensor | None = None,
) -> None:
    """As `paged_prefill`, but that `longest` is the same in all steps and, with `are_decodes`, that each sequence has
    one row, and starts is 0, 1, ..., rows. Raises ValueError for other shapes and dtypes."""
    rows, heads, head_dim = q.shape
    kv_heads, block_size = layer.shape[2], layer.shape[3]
    check_attention_inputs(q, layer, seqs, scales)
    check_query_ranges(q, starts, out)
    num_seqs, split = len(starts) - 1, split_length(longest)
    if num_seqs < 1 or not len(out):
        return
    group, dim, most = heads // kv_heads, max(next_power_of_2(head_dim), 16), ceil_div(longest, split)
    target, sums = out, out
    if are_decodes:
        target = torch.empty((rows, heads, most, head_dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((rows, heads, most, 2), dtype=torch.float32, device=q.device)
    tile = 64 if dim * q.element_size() <= 256 else 32
    cut = {"WINDOW": window or 0, "HEAD_DIM": head_dim, "DIM": dim, "SPLIT": split, "MOST": most}
    _attend_kernel[(kv_heads, len(out) * group // 64 + num_seqs, most if are_decodes else 1)](
        q,
        layer,
        seqs.slots,
        seqs.positions,
        seqs.tables,
        starts,
        target,
        sums,
        q if scales is None else scales,
        q.stride(0),
        seqs.tables.stride(0),
        num_seqs,
        scale if soft_cap is not None else scale * _LOG2E,
        SCALED=scales is not None,
        CAP=soft_cap or 0.0,
        GROUP=group,
        ROWS=64,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        TILE=tile,
        SHARED=are_decodes,
        num_warps=4,
        num_stages=3 if tile == 64 else 2,
        **cut,
    )
    if are_decodes:
        _merge_kernel[(rows, heads)](
            seqs.slots,
            seqs.positions,
            target,
            sums,
            q if scales is None else scales,
            out,
            SCALED=scales is not None,
            HEADS=heads,
            num_warps=1,
            **cut,
        )
