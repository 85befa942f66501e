"""Tiles of queries and keys, as the kernels of prefill attention have them."""

import triton
import triton.language as tl


@triton.jit
def attention_inner_loop(
    q,
    total,
    mass,
    top,
    positions,
    begin,
    stop,
    end,
    table_ptr,
    layer_ptr,
    head,
    scale,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Passes over the tiles of keys from begin to stop; none from `end` on, or behind all rows' windows, is read.

    `scale` is in powers of two.
    """
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    for start in range(begin, stop, TILE):
        keys = start + tl.arange(0, TILE)
        known = keys < end
        if WINDOW > 0:  # blocks that lie wholly behind it may be somebody else's
            known = known & (keys > tl.min(positions, 0) - WINDOW)
        if MASK:
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        else:
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
        lines = ((blocks * (2 * KV_HEADS) + head) * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
        k_ptr = layer_ptr + lines[None, :] + dims[:, None]
        v_ptr = layer_ptr + KV_HEADS * BLOCK_SIZE * HEAD_DIM + lines[:, None] + dims[None, :]
        if MASK:
            k = tl.load(k_ptr, mask=known[None, :] & in_head[:, None], other=0.0)
            v = tl.load(v_ptr, mask=known[:, None] & in_head[None, :], other=0.0)
        elif DIM > HEAD_DIM:
            k = tl.load(k_ptr, mask=in_head[:, None], other=0.0)
            v = tl.load(v_ptr, mask=in_head[None, :], other=0.0)
        else:
            k = tl.load(k_ptr)
            v = tl.load(v_ptr)
        k, v = k.to(q.dtype), v.to(q.dtype)  # from 8 bits, if the pool has them
        scores = tl.dot(q, k, input_precision="ieee")
        if CAP > 0:
            scores = (2 * tl.sigmoid(scores * (2 * scale / CAP)) - 1) * (CAP * 1.4426950408889634)
        else:
            scores = scores * scale
        if MASK:
            seen = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see none of these keys
        else:
            higher = tl.maximum(top, tl.max(scores, 1))
            base = higher
        shares = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        mass = mass * fade + tl.sum(shares, 1)
        total = total * fade[:, None]
        total = tl.dot(shares.to(v.dtype), v, total, input_precision="ieee")
        top = higher
    return total, mass, top


@triton.jit
def find_query_tile(starts_ptr, num_seqs, tile, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile: its sequence, that one's first row, the row after its last, and the tile's first line in it.

    Sequence i has the tiles from starts[i] * GROUP // ROWS + i on, as many as it needs at most. A line is a token and
    one of the heads that share a K/V head.
    """
    base = tl.load(starts_ptr)
    seq = -1
    for i in range(0, num_seqs, 32):
        index = i + tl.arange(0, 32)
        start = tl.load(starts_ptr + index, mask=index < num_seqs, other=0)
        first = (start - base) * GROUP // ROWS + index
        seq += tl.sum(((first <= tile) & (index < num_seqs)).to(tl.int32), 0)
    start = tl.load(starts_ptr + seq)
    first = (start - base) * GROUP // ROWS + seq
    return seq, start, tl.load(starts_ptr + seq + 1), (tile - first) * ROWS
