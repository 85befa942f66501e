"""Attention of several new tokens a sequence over KV blocks in a pool, read through the block tables; on a GPU.

After FlashAttention-2 (Dao 2023): a tile of queries passes over its keys once, with a running maximum and sum. Tokens
and the heads that share a K/V head are the rows of one tile. Masks are worked out only where a tile can need one. Of
few tiles with long sequences each is shared by several programs, whose parts a second kernel puts together.
"""

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.attention import prefill_hopper
from blockyard.kernels.attention.prefill_tiles import attention_inner_loop, find_query_tile
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata, check_attention_inputs, check_query_ranges

_LOG2E = 1.4426950408889634
_PROGRAMS = 132  # multiprocessors: with fewer programs, tiles are shared
_MOST_SPLITS = 16
_LONG = 1024  # sequences that may be longer are worth a second kernel
_KEY_US = 0.04  # of a program here, two of which run at a time on a processor: its rows on a key
_HOPPER_KEY_US = 0.0125
_COMBINE_US = 3.0  # a second kernel
_PART_US = 3.2e-6  # an element of a part, written and read: 8 bytes at 2.5 TB/s


@dataclass(frozen=True, slots=True)
class Config:
    rows: int  # queries of a tile, a token and head each
    keys: int
    warps: int
    stages: int


def pick_config(head_dim: int, dtype: torch.dtype) -> Config:
    """By what fits shared memory and registers."""
    wide = head_dim * dtype.itemsize
    if wide <= 256 and dtype.itemsize <= 2:
        return Config(128, 64, 4, 3)
    return Config(64, 32, 4, 2 if wide <= 512 else 1)


def paged_prefill_reference(
    q: Tensor,
    layer: Tensor,
    seqs: PagedKVMetadata,
    starts: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Tensor:
    kv_heads, block_size, head_dim = layer.shape[2:]
    out = torch.zeros_like(q)
    bounds = starts.tolist()
    for start, end in itertools.pairwise(bounds):
        slot, first = (int(seqs.slots[start]), int(seqs.positions[start])) if start < end else (-1, 0)
        if slot < 0:
            continue
        length = first + end - start
        blocks = seqs.tables[slot, : (length - 1) // block_size + 1].long()
        keys, values = layer[blocks].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :length]
        grouped = q[start:end].view(end - start, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = grouped @ keys.mT[:, None] * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        position = torch.arange(first, length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        hidden = torch.where(seen.any(0)[:, None], values, 0)  # 0 times what is not a number would be none
        out[start:end] = (shares @ hidden[:, None]).permute(2, 0, 1, 3).reshape(end - start, -1, head_dim)
    return out[bounds[0] :].flatten(1)


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "starts_ptr", "out_ptr"],
)
def _prefill_kernel(
    q_ptr,
    layer_ptr,
    slots_ptr,
    positions_ptr,
    tables_ptr,
    starts_ptr,
    out_ptr,
    weight_ptr,
    scales_ptr,
    q_stride,
    table_stride,
    num_seqs,
    scale,
    SCALED: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
):
    # program (i, j, k) has part k of the keys of K/V head i of tile j from the end: the longest come first
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
    lowest = before + first_line // GROUP
    end = before + (tl.minimum(first_line + ROWS, num_lines) - 1) // GROUP + 1
    end = tl.where(slot < 0, 0, end)
    begin, unmasked_from = 0, 0
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // TILE * TILE
        unmasked_from = tl.cdiv(tl.maximum(end - WINDOW, 0), TILE) * TILE
    stop = end
    if SHARED:
        part = tl.cdiv(tl.cdiv(end - begin, TILE), tl.num_programs(2)) * TILE
        begin += tl.program_id(2) * part
        stop = tl.minimum(begin + part, end)
    unmasked_to = tl.maximum(tl.minimum((lowest + 1) // TILE * TILE, stop), begin)

    v_scale = 1.0
    if SCALED:
        scale *= tl.load(scales_ptr)
        v_scale = tl.load(scales_ptr + 1)
    dims = tl.arange(0, DIM)
    row = (start + lines // GROUP).to(tl.int64)
    heads = head * GROUP + lines % GROUP
    inside = (lines < num_lines)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    table = tables_ptr + slot * table_stride
    if WINDOW > 0:
        masked_to = tl.maximum(tl.minimum(unmasked_from, unmasked_to), begin)
        total, mass, top = attention_inner_loop(
            q, total, mass, top, positions, begin, masked_to, end, table, layer_ptr, head, scale,
            True, WINDOW, CAP, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
        begin = masked_to
    total, mass, top = attention_inner_loop(
        q, total, mass, top, positions, begin, unmasked_to, end, table, layer_ptr, head, scale,
        False, WINDOW, CAP, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE,
    )  # fmt: skip
    total, mass, top = attention_inner_loop(
        q, total, mass, top, positions, unmasked_to, stop, end, table, layer_ptr, head, scale,
        True, WINDOW, CAP, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE,
    )  # fmt: skip
    total = total * (v_scale / tl.where(mass > 0, mass, 1.0))[:, None]  # zeros where a row has seen nothing
    place = (row - tl.load(starts_ptr)) * (KV_HEADS * GROUP) + heads
    if SHARED:
        place = place * tl.num_programs(2) + tl.program_id(2)
        tl.store(weight_ptr + place, top + tl.log2(tl.where(mass > 0, mass, 1.0)), mask=lines < num_lines)
    tl.store(out_ptr + place[:, None] * HEAD_DIM + dims[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["out_ptr"])
def _combine_kernel(
    partial_ptr, weight_ptr, out_ptr, splits, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MOST: tl.constexpr
):
    # program i has a token and head
    place = tl.program_id(0).to(tl.int64)
    split, dims = tl.arange(0, MOST), tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    weight = tl.load(weight_ptr + place * splits + split, mask=split < splits, other=float("-inf"))
    top = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top))
    mass = tl.sum(weight, 0)
    parts = tl.load(
        partial_ptr + (place * splits + split)[:, None] * HEAD_DIM + dims[None, :],
        mask=(weight > 0)[:, None] & in_head[None, :],  # a part without keys has written none
        other=0.0,
    )
    total = tl.sum(parts * weight[:, None], 0) / tl.where(mass > 0, mass, 1.0)
    tl.store(out_ptr + place * HEAD_DIM + dims, total, mask=in_head)


def paged_prefill(
    q: Tensor,
    layer: Tensor,
    seqs: PagedKVMetadata,
    starts: Tensor,
    scale: float,
    window: int | None,
    longest: int,
    out: Tensor,
    soft_cap: float | None = None,
    scales: Tensor | None = None,
) -> None:
    """Causal attention of the rows from starts[0] on; the K and V of all of them are in the pool already.

    q [rows, heads, head_dim], rows may be strided; layer [num_blocks, 2, kv_heads, block_size, head_dim]. starts
    [num_seqs + 1] int32: first row of each sequence, and `rows`; the rows of one follow each other, and so do their
    positions. `window`: how many of the last keys a token sees, None all. `soft_cap`: scores become
    soft_cap * tanh(score / soft_cap). `longest`: no position is beyond it; it only says how work is shared. `scales`:
    of a pool of 8-bit floats, see `check_kv_dtype`. out [rows - starts[0], heads * head_dim], contiguous, is written
    whole, with zeros for sequences of no slot. Blocks, positions and starts must be right: not checked on device.
    Raises ValueError for other shapes and dtypes.
    """
    _, heads, head_dim = q.shape
    kv_heads, block_size = layer.shape[2], layer.shape[3]
    check_attention_inputs(q, layer, seqs, scales)
    check_query_ranges(q, starts, out)
    num_seqs = len(starts) - 1
    if num_seqs < 1 or not len(out):
        return
    hopper = scales is None and soft_cap is None and window is None and prefill_hopper.fits(q, layer)
    config, group = pick_config(head_dim, q.dtype), heads // kv_heads
    lines = prefill_hopper.ROWS if hopper else config.rows
    tiles = len(out) * group // lines + num_seqs
    seen = longest if window is None else min(window + len(out), longest)
    work = ceil_div(len(out) * group, lines) * kv_heads  # of one sequence: of several some tiles are not full
    if hopper:
        splits = _num_splits(work, seen, _PROGRAMS, _HOPPER_KEY_US, out.numel())
    else:
        splits = _num_splits(work, seen, 2 * _PROGRAMS, _KEY_US, out.numel())
    target, weight = out, out
    if splits > 1:
        target = torch.empty((len(out), heads, splits, head_dim), dtype=torch.float32, device=q.device)
        weight = torch.empty((len(out), heads, splits), dtype=torch.float32, device=q.device)
    dim = max(next_power_of_2(head_dim), 16)
    if hopper:
        prefill_hopper.prefill_hopper(q, layer, seqs, starts, scale, window, target, weight, splits)
    else:
        _prefill_kernel[(kv_heads, tiles, splits)](
            q,
            layer,
            seqs.slots,
            seqs.positions,
            seqs.tables,
            starts,
            target,
            weight,
            q if scales is None else scales,
            q.stride(0),
            seqs.tables.stride(0),
            num_seqs,
            scale if soft_cap is not None else scale * _LOG2E,
            SCALED=scales is not None,
            WINDOW=window or 0,
            CAP=soft_cap or 0.0,
            GROUP=group,
            ROWS=config.rows,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            DIM=dim,
            BLOCK_SIZE=block_size,
            TILE=config.keys,
            SHARED=splits > 1,
            num_warps=config.warps,
            num_stages=config.stages,
        )
    if splits > 1:
        _combine_kernel[(len(out) * heads,)](
            target, weight, out, splits, HEAD_DIM=head_dim, DIM=dim, MOST=_MOST_SPLITS, num_warps=1
        )


def _num_splits(programs: int, longest: int, most: int, key_us: float, elements: int) -> int:
    """Of the keys of each program, `most` of which run at a time and take `key_us` for a key: what is soonest over with
    the kernel that puts the parts of so many elements together."""
    if longest < _LONG:
        return 1

    def took_us(splits: int) -> float:
        rounds = ceil_div(programs * splits, most)
        combined = _COMBINE_US + splits * elements * _PART_US if splits > 1 else 0.0
        return rounds * longest / splits * key_us + combined

    return min(range(1, _MOST_SPLITS + 1), key=took_us)
