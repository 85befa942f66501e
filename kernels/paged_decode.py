"""Attention of one new token a sequence over KV blocks in a pool, read through the block tables; on a GPU.

A sequence is cut into splits whose length follows from its own length alone, so its result does not depend on what
else is in the step; a second kernel puts the splits together. Heads that share a K/V head are the rows of one tile.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_SPLIT = 128  # keys
MAX_SPLITS = 32
_TILE_BYTES = 64 * 256  # of the keys of a tile: with values and two stages 64 KiB of shared memory
_MOST_KEYS = 64
_PROGRAMS = 32 * 132  # beyond it programs loop over splits; most find none, but one long sequence needs them


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the sequences of a decode step lie, on the device."""

    slots: Tensor  # [rows] int64, row of `tables`; below 0: a row that pads, of no sequence
    positions: Tensor  # [rows] int64, of the new token; all up to it are attended to
    tables: Tensor  # [slots, blocks] int32

    def check(self, rows: int) -> None:
        """Raises ValueError."""
        if self.slots.shape != (rows,) or self.positions.shape != (rows,) or self.tables.ndim != 2:
            raise ValueError(f"slots {list(self.slots.shape)}, positions {list(self.positions.shape)} for {rows} rows")
        if self.slots.dtype != torch.int64 or self.positions.dtype != torch.int64 or self.tables.dtype != torch.int32:
            raise ValueError(
                f"expected int64, int64, int32: {self.slots.dtype}, {self.positions.dtype}, {self.tables.dtype}"
            )
        if self.slots.stride(0) != 1 or self.positions.stride(0) != 1 or self.tables.stride(1) != 1:
            raise ValueError("slots, positions and the rows of tables must be contiguous")


def paged_decode_reference(q: Tensor, layer: Tensor, seqs: Sequences, scale: float, window: int | None) -> Tensor:
    kv_heads, block_size, head_dim = layer.shape[2:]
    out = torch.zeros_like(q)
    for row, (slot, position) in enumerate(zip(seqs.slots.tolist(), seqs.positions.tolist(), strict=True)):
        if slot < 0:
            continue
        first = 0 if window is None else max(position + 1 - window, 0)
        blocks = seqs.tables[slot, : position // block_size + 1].long()
        keys, values = (
            layer[blocks].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, first : position + 1]
        )
        grouped = q[row].view(kv_heads, -1, head_dim)
        out[row] = ((grouped @ keys.mT * scale).softmax(-1) @ values).view(-1, head_dim)
    return out.flatten(1)


@triton.jit
def _cut(
    slots_ptr, positions_ptr, row, WINDOW: tl.constexpr, MIN: tl.constexpr, MOST: tl.constexpr, TILE: tl.constexpr
):
    """Of a row: slot, first key, end of keys, length of a split, number of splits."""
    slot = tl.load(slots_ptr + row)
    end = tl.where(slot < 0, 0, tl.load(positions_ptr + row) + 1).to(tl.int32)
    first = end * 0
    if WINDOW > 0:
        first = tl.maximum(end - WINDOW, 0)
    split = tl.maximum(MIN, tl.cdiv(tl.cdiv(end - first, MOST), TILE) * TILE)
    return slot, first, end, split, tl.cdiv(end - first, split)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _attend_kernel(
    q_ptr,
    layer_ptr,
    slots_ptr,
    positions_ptr,
    tables_ptr,
    partial_ptr,
    weight_ptr,
    q_stride,
    table_stride,
    scale,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MIN: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
):
    # program (i, j, k) has splits k, k + programs, ... of K/V head j of row i
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot, first, end, split, num_splits = _cut(slots_ptr, positions_ptr, row, WINDOW, MIN, MOST, TILE)
    group, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    heads = head * GROUP + group
    in_group = (group < GROUP)[:, None] & in_head[None, :]
    q = tl.load(q_ptr + row * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=in_group, other=0.0)
    for i in range(tl.program_id(2), num_splits, tl.num_programs(2)):
        begin = first + i * split
        stop = tl.minimum(begin + split, end)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, DIM], tl.float32)
        for start in range(begin, stop, TILE):
            keys = start + tl.arange(0, TILE)
            known = keys < stop
            blocks = tl.load(tables_ptr + slot * table_stride + keys // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            lines = (blocks * (2 * KV_HEADS) + head) * BLOCK_SIZE + keys % BLOCK_SIZE
            k = tl.load(
                layer_ptr + lines[None, :] * HEAD_DIM + dims[:, None], mask=known[None, :] & in_head[:, None], other=0.0
            )
            v = tl.load(
                layer_ptr + (lines + KV_HEADS * BLOCK_SIZE)[:, None] * HEAD_DIM + dims[None, :],
                mask=known[:, None] & in_head[None, :],
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision="ieee") * scale
            scores = tl.where(known[None, :], scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))  # finite: a tile has at least one known key
            shares = tl.exp(scores - higher[:, None])
            fade = tl.exp(top - higher)
            mass = mass * fade + tl.sum(shares, 1)
            total = total * fade[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
            top = higher
        place = (row * KV_HEADS * GROUP + heads) * MOST + i
        tl.store(partial_ptr + place[:, None] * HEAD_DIM + dims[None, :], total / mass[:, None], mask=in_group)
        tl.store(weight_ptr + place, top + tl.log(mass), mask=group < GROUP)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"])
def _combine_kernel(
    slots_ptr,
    positions_ptr,
    partial_ptr,
    weight_ptr,
    out_ptr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    MIN: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
):
    # program (i, j) has head j of row i
    row = tl.program_id(0).to(tl.int64)
    _, _, _, _, num_splits = _cut(slots_ptr, positions_ptr, row, WINDOW, MIN, MOST, TILE)
    place = row * HEADS + tl.program_id(1)
    splits, dims = tl.arange(0, MOST), tl.arange(0, DIM)
    in_head, done = dims < HEAD_DIM, splits < num_splits
    weight = tl.load(weight_ptr + place * MOST + splits, mask=done, other=float("-inf"))
    top = tl.where(num_splits > 0, tl.max(weight, 0), 0.0)
    weight = tl.exp(weight - top)
    parts = tl.load(
        partial_ptr + (place * MOST + splits)[:, None] * HEAD_DIM + dims[None, :],
        mask=done[:, None] & in_head[None, :],
        other=0.0,
    )
    mass = tl.where(num_splits > 0, tl.sum(weight, 0), 1.0)  # rows that pad get zeros
    tl.store(out_ptr + place * HEAD_DIM + dims, tl.sum(parts * weight[:, None], 0) / mass, mask=in_head)


def paged_decode(
    q: Tensor,
    layer: Tensor,
    seqs: Sequences,
    scale: float,
    window: int | None,
    longest: int,
    out: Tensor | None = None,
) -> Tensor:
    """q [rows, heads, head_dim], rows may be strided; layer [num_blocks, 2, kv_heads, block_size, head_dim].

    `window`: how many of the last keys are attended to, None all. `longest`: no position is beyond it; it only sizes
    buffers. Returns `out` [rows, heads * head_dim], contiguous, made if None; zeros in rows of no slot. Blocks and
    positions must be right: not checked on device. Raises ValueError for other shapes and dtypes.
    """
    rows, heads, head_dim = q.shape
    kv_heads, block_size = layer.shape[2], layer.shape[3]
    seqs.check(rows)
    if layer.shape[4] != head_dim or heads % kv_heads or not layer.is_contiguous():
        raise ValueError(f"q {list(q.shape)} does not fit a layer {list(layer.shape)}, or that is not contiguous")
    if q.stride(2) != 1 or q.stride(1) != head_dim or q.dtype != layer.dtype:
        raise ValueError(f"the heads of a row must be contiguous and of the pool's dtype, got {q.stride()}, {q.dtype}")
    seen = longest if window is None else min(window, longest)
    most = triton.next_power_of_2(min(MAX_SPLITS, triton.cdiv(seen, MIN_SPLIT)))
    if out is None:
        out = torch.empty((rows, heads * head_dim), dtype=q.dtype, device=q.device)
    if out.shape != (rows, heads * head_dim) or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out {list(out.shape)} {out.dtype} does not fit q {list(q.shape)}, or is not contiguous")
    if rows == 0:
        return out
    partial = torch.empty((rows, heads, most, head_dim), dtype=torch.float32, device=q.device)
    weight = torch.empty((rows, heads, most), dtype=torch.float32, device=q.device)
    dim = max(triton.next_power_of_2(head_dim), 16)
    tile = max(min(_TILE_BYTES // (dim * q.element_size()), _MOST_KEYS), 16)
    cut = {"WINDOW": window or 0, "MIN": MIN_SPLIT, "MOST": most, "TILE": tile}
    programs = min(most, triton.cdiv(_PROGRAMS, rows * kv_heads))
    _attend_kernel[(rows, kv_heads, programs)](
        q,
        layer,
        seqs.slots,
        seqs.positions,
        seqs.tables,
        partial,
        weight,
        q.stride(0),
        seqs.tables.stride(0),
        scale,
        GROUP=heads // kv_heads,
        ROWS=max(triton.next_power_of_2(heads // kv_heads), 16),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=block_size,
        num_warps=4,
        num_stages=2 if q.element_size() == 2 else 1,
        **cut,
    )
    _combine_kernel[(rows, heads)](
        seqs.slots, seqs.positions, partial, weight, out, HEADS=heads, HEAD_DIM=head_dim, DIM=dim, num_warps=2, **cut
    )
    return out
