"""Device functions of `fused_decode`, in which the lanes of a program work independently until the end.

A lane is a group of adjacent threads that together load one row of DIM elements. Of a tile of keys [KEYS * LANES, DIM]
a lane has every LANES-th key, and its own online softmax. So no threads of different lanes exchange values before the
lanes are combined.
"""

import triton
import triton.language as tl

from blockyard.kernels.attention.attention_tiles import add_sinks, apply_soft_cap, oldest_key
from blockyard.kernels.attention.combine import is_last_split


@triton.jit
def norm_and_rotate(x, norm_weight, cos, sin, eps, HEAD_DIM: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr):
    """Normalises and rotates a head in each row; elements 2i and 2i + 1 are a pair."""
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None] * norm_weight.to(tl.float32)
    if ROTATE:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        x = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), x.shape)
    return x


@triton.jit
def load_kv_tile(
    start, stop, table_ptr, layer_ptr, head,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys and values from `start` on, below `stop`, [TILE, DIM] each."""
    dims = tl.arange(0, DIM)
    keys = start + tl.arange(0, TILE)
    inside = (keys < stop)[:, None] & (dims < HEAD_DIM)[None, :]
    blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < stop, other=0).to(tl.int64)
    kv_rows = (blocks * (2 * KV_HEADS) + head) * BLOCK_SIZE + keys % BLOCK_SIZE
    places = layer_ptr + kv_rows[:, None] * HEAD_DIM + dims[None, :]
    k = tl.load(places, mask=inside, other=0.0)
    v = tl.load(places + KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=inside, other=0.0)
    return k, v


@triton.jit
def online_softmax_update(
    q, k, v, start, stop, scale, acc, l_i, m_i,
    KEYS: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Adds a tile, whose keys from `start` on end at `stop`, to acc, l_i and m_i of each lane."""
    valid = start + tl.arange(0, KEYS * LANES) < stop
    k = tl.reshape(k.to(tl.float32), [KEYS, LANES, DIM])
    v = tl.reshape(v.to(tl.float32), [KEYS, LANES, DIM])
    scores = apply_soft_cap(tl.sum(k * q[None, :, :], 2), scale, CAP)
    scores = tl.where(tl.reshape(valid, [KEYS, LANES]), scores, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(scores, 0))
    m_safe = tl.maximum(m_new, -3e38)  # while the lane has seen no key
    p = tl.exp2(scores - m_safe[None, :])
    alpha = tl.exp2(m_i - m_safe)
    acc = acc * alpha[:, None] + tl.sum(p[:, :, None] * v, 0)
    return acc, l_i * alpha + tl.sum(p, 0), m_new


@triton.jit
def combine_head_splits(
    out_ptr, partial_out_ptr, lse_ptr, num_splits, sinks_ptr, head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combines a head's splits by their log-sum-exp, SPLITS at a time, all of which are loaded at once."""
    dims = tl.arange(0, DIM)
    m_i = float("-inf")
    l_i = 0.0
    acc = tl.zeros([DIM], tl.float32)
    for start in range(0, num_splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        lse = tl.load(lse_ptr + split, mask=split < num_splits, other=float("-inf"), cache_modifier=".cg")
        inside = (split < num_splits)[:, None] & (dims < HEAD_DIM)[None, :]
        places = partial_out_ptr + split[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(places, mask=inside, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m_i, tl.max(lse, 0))
        alpha = tl.exp2(m_i - m_new)
        p = tl.exp2(lse - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(values * p[:, None], 0)
        m_i = m_new
    l_i = add_sinks(l_i, m_i, sinks_ptr, head, 1, HEADS)
    tl.store(out_ptr + dims, acc / l_i, mask=dims < HEAD_DIM)


@triton.jit
def split_key_range(
    position, split, max_splits, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, MIN_KEYS: tl.constexpr
):  # fmt: skip
    """First and end key of a split, all older than the new key, and the number of splits, at most `max_splits`."""
    first = 0
    if WINDOW > 0:
        first = oldest_key(position, WINDOW, CHUNKED)
    keys = position - first
    num_splits = tl.minimum(tl.maximum(tl.cdiv(keys, MIN_KEYS), 1), max_splits)
    keys_per_split = tl.cdiv(tl.cdiv(keys, num_splits), 16) * 16
    begin = first + split * keys_per_split
    return (
        begin,
        tl.minimum(begin + keys_per_split, position),
        tl.maximum(tl.cdiv(keys, tl.maximum(keys_per_split, 1)), 1),
    )


@triton.jit
def quantize(x, scale, dtype: tl.constexpr, FP8_MAX: tl.constexpr):
    """x in the dtype of the cache."""
    if FP8_MAX > 0:
        x = tl.minimum(tl.maximum(x / scale, -FP8_MAX), FP8_MAX)
    return x.to(dtype)


@triton.jit
def write_kv(
    block, layer_ptr, head, position, k, v, mask,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the new key and value of a head to a block, from the row of k and v that `mask` selects."""
    kv_row = ((block * (2 * KV_HEADS) + head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    places = layer_ptr + kv_row + tl.broadcast_to(tl.arange(0, k.shape[1])[None, :], k.shape)
    tl.store(places, k, mask=mask)
    tl.store(places + KV_HEADS * BLOCK_SIZE * HEAD_DIM, v, mask=mask)


@triton.jit
def load_head(ptr, head, dims, inside, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, DIM: tl.constexpr):
    """A head [LANES, DIM], the same in each row: each thread loads what it needs, so threads exchange nothing."""
    return tl.load(tl.broadcast_to(ptr + head * HEAD_DIM + dims[None, :], [LANES, DIM]), mask=inside, other=0.0)


@triton.jit
def store_split(
    acc, l_i, m_i, v_scale, slot, out_head, split, num_splits, out_ptr, partial_out_ptr, lse_ptr, semaphores_ptr,
    sinks_ptr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combines the lanes of a split and stores it. The last of a head's programs combines the splits, SPLITS at a time,
    and resets the counter.
    """
    dims = tl.arange(0, DIM)
    m_row = tl.max(m_i, 0)
    alpha = tl.exp2(m_i - m_row)
    l_i = add_sinks(tl.sum(l_i * alpha, 0), m_row, sinks_ptr, out_head % HEADS, num_splits, HEADS)
    acc = tl.sum(acc * alpha[:, None], 0) * (v_scale / l_i)
    if num_splits == 1:
        acc = tl.where(slot >= 0, acc, 0.0)
        tl.store(out_ptr + out_head * HEAD_DIM + dims, acc, mask=dims < HEAD_DIM)
    else:
        first = out_head * tl.num_programs(1)
        tl.store(partial_out_ptr + (first + split) * HEAD_DIM + dims, acc, mask=dims < HEAD_DIM)
        tl.store(lse_ptr + first + split, m_row + tl.log2(l_i))
        if is_last_split(semaphores_ptr + out_head, num_splits):
            tl.debug_barrier()
            combine_head_splits(
                out_ptr + out_head * HEAD_DIM, partial_out_ptr + first * HEAD_DIM, lse_ptr + first, num_splits,
                sinks_ptr, out_head % HEADS, HEADS, HEAD_DIM, DIM, SPLITS,
            )  # fmt: skip
            tl.store(semaphores_ptr + out_head, 0)
