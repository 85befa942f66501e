"""Device functions over tiles of queries and keys that the attention kernels share."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.int_math import next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata


def launch_arguments(
    q: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    query_start_loc: Tensor,
    rules: ScoreRules,
    out: Tensor,
    sums: Tensor,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the prefill and batch-invariant kernels by position, and others that both have by name.

    sums: where log-sum-exps, or maxima and sums, of splits are stored.
    """
    head_dim, scales = q.shape[2], rules.kv_scales
    check_sinks(q, rules.sinks)
    arguments = (
        q, layer, metadata.slots, metadata.positions, metadata.tables, query_start_loc, out, sums,
        q if scales is None else scales, q.stride(0), metadata.tables.stride(0), len(query_start_loc) - 1,
        rules.power_scale,
    )  # fmt: skip
    constants = {
        "SCALED": scales is not None, "WINDOW": rules.window or 0, "CHUNKED": rules.chunked,
        "CAP": rules.soft_cap or 0.0,
        "GROUP": q.shape[1] // layer.shape[2], "KV_HEADS": layer.shape[2], "HEAD_DIM": head_dim,
        "DIM": max(next_power_of_2(head_dim), 16), "BLOCK_SIZE": layer.shape[3],
        "sinks_ptr": rules.sinks,
    }  # fmt: skip
    return arguments, constants


def check_sinks(q: Tensor, sinks: Tensor | None) -> None:
    """Checks the sinks of a layer, [heads] float32, for q [rows, heads, head_dim]. Raises ValueError."""
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.dtype != torch.float32 or sinks.stride(0) != 1):
        raise ValueError(f"sinks {list(sinks.shape)} {sinks.dtype} are not one float32 for each head of {q.shape[1]}")


@triton.jit
def add_sinks(l_i, m_i, sinks_ptr, heads, num_splits, HEADS: tl.constexpr):
    """l_i with the sinks of query heads, scores without a value; as it is, if these are one of several splits.

    sinks_ptr: None compiles to nothing. m_i: of the softmax, to which l_i is relative.
    """
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + heads, mask=heads < HEADS, other=float("-inf"))
        m_safe = tl.where(m_i == float("-inf"), 0.0, m_i)  # of a row without keys, whose output is 0
        power = tl.minimum(tl.fma(sink, 1.4426950408889634, -m_safe), 126.0)  # so large a sink makes the output 0
        l_i += tl.where(num_splits == 1, tl.exp2(power), 0.0)
    return l_i


@triton.jit
def oldest_key(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first key that a query at `position`, not negative, attends to in a layer with a window.

    CHUNKED: positions are in chunks of WINDOW, and a query attends to its own chunk. Otherwise the window slides.
    """
    if CHUNKED:
        return position // WINDOW * WINDOW
    return tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def apply_soft_cap(scores, scale, CAP: tl.constexpr):
    """CAP * tanh(scores * scale / CAP), no cap if CAP is 0; in powers of two, as `tl.exp2` takes them.

    `scale` includes log2(e) only where there is no cap. With a cap, this function multiplies by it.
    """
    if CAP > 0:
        return (2 * tl.sigmoid(scores * (2 * scale / CAP)) - 1) * (CAP * 1.4426950408889634)
    return scores * scale


@triton.jit
def attention_inner_loop(
    q, acc, l_i, m_i, positions, begin, stop, end, table_ptr, layer_ptr, head, scale,
    MASK: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAP: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax (FlashAttention-2) over the key tiles from `begin` to `stop`: updates acc, l_i and m_i.

    No key from `end` on is read, nor one behind the window of all rows. scale, CAP: of `apply_soft_cap`. MASK: some row
    of the tile may not see all of these keys.
    """
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    for start in range(begin, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        valid = keys < end
        if WINDOW > 0:  # blocks behind the window may belong to another sequence
            valid = valid & (keys >= oldest_key(tl.min(positions, 0), WINDOW, CHUNKED))
        if MASK:
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        else:
            blocks = tl.load(table_ptr + keys // BLOCK_SIZE).to(tl.int64)
        kv_rows = ((blocks * (2 * KV_HEADS) + head) * BLOCK_SIZE + keys % BLOCK_SIZE) * HEAD_DIM
        k_ptr = layer_ptr + kv_rows[None, :] + dims[:, None]
        v_ptr = layer_ptr + KV_HEADS * BLOCK_SIZE * HEAD_DIM + kv_rows[:, None] + dims[None, :]
        if MASK:
            k = tl.load(k_ptr, mask=valid[None, :] & in_head[:, None], other=0.0)
            v = tl.load(v_ptr, mask=valid[:, None] & in_head[None, :], other=0.0)
        elif DIM > HEAD_DIM:
            k = tl.load(k_ptr, mask=in_head[:, None], other=0.0)
            v = tl.load(v_ptr, mask=in_head[None, :], other=0.0)
        else:
            k = tl.load(k_ptr)
            v = tl.load(v_ptr)
        k, v = k.to(q.dtype), v.to(q.dtype)  # dequantized, if the cache is 8-bit
        scores = tl.dot(q, k, input_precision="ieee")
        scores = apply_soft_cap(scores, scale, CAP)
        if MASK:
            visible = keys[None, :] <= positions[:, None]
            if WINDOW > 0:
                visible = visible & (keys[None, :] >= oldest_key(positions, WINDOW, CHUNKED)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            m_new = tl.maximum(m_i, tl.max(scores, 1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row may see none of these keys
        else:
            m_new = tl.maximum(m_i, tl.max(scores, 1))
            m_safe = m_new
        p = tl.exp2(scores - m_safe[:, None])
        alpha = tl.exp2(m_i - m_safe)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit
def find_query_tile(query_start_ptr, num_seqs, tile, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns a query tile's sequence, that sequence's first row and end row, and the tile's first row in it.

    A row of the tile is a token and one of the query heads that share a K/V head. Sequence i has the tiles from
    query_start_loc[i] * GROUP // BLOCK_M + i on: as many as it can need.
    """
    first_row = tl.load(query_start_ptr)
    seq = -1
    for i in range(0, num_seqs, 32):
        index = i + tl.arange(0, 32)
        start = tl.load(query_start_ptr + index, mask=index < num_seqs, other=0)
        first = (start - first_row) * GROUP // BLOCK_M + index
        seq += tl.sum(((first <= tile) & (index < num_seqs)).to(tl.int32), 0)
    start = tl.load(query_start_ptr + seq)
    first = (start - first_row) * GROUP // BLOCK_M + seq
    return seq, start, tl.load(query_start_ptr + seq + 1), (tile - first) * BLOCK_M


@triton.jit
def query_positions(slots_ptr, positions_ptr, start, start_m, num_m, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns a query tile's slot, context length, rows, their positions, and the end of the keys that any row may see.

    The tile begins at row `start_m` of a sequence with `num_m` rows, which begins at token `start` of the batch.
    """
    slot = tl.load(slots_ptr + start)
    context_len = tl.load(positions_ptr + start).to(tl.int32)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    positions = context_len + offs_m // GROUP
    end = context_len + (tl.minimum(start_m + BLOCK_M, num_m) - 1) // GROUP + 1
    return slot, context_len, offs_m, positions, tl.where(slot < 0, 0, end)


@triton.jit
def load_queries(
    q_ptr, q_stride, start, offs_m, num_m, head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Returns q [BLOCK_M, DIM], each row's index in the batch and query head, and which elements exist."""
    dims = tl.arange(0, DIM)
    row = (start + offs_m // GROUP).to(tl.int64)
    heads = head * GROUP + offs_m % GROUP
    inside = (offs_m < num_m)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    return q, row, heads, inside
