"""Attention of packed sequences in both directions, without a KV cache; on a GPU. For encoders.

After FlashAttention-2 (https://arxiv.org/abs/2307.08691): a tile of queries passes over the keys of its sequence once,
with an online softmax. Tokens of all sequences are rows of one tensor, without padding between them. Heads may have any
size that is a multiple of 8: tiles are as wide as the next power of two.
"""

import itertools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.attention.score_rules import LOG2E, ScoreRules
from blockyard.kernels.tensor_checks import check_tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """Tile sizes and launch options of the kernel."""

    block_m: int  # queries of a tile
    block_n: int  # keys of a tile
    warps: int
    stages: int


def choose_config(head_dim: int, dtype: torch.dtype, max_seq_len: int) -> PackedConfig:
    """The config that fits shared memory and registers. max_seq_len: of the longest sequence of the step."""
    wide = triton.next_power_of_2(head_dim) * dtype.itemsize
    if wide > 512 or (dtype.itemsize > 2 and wide > 256):
        return PackedConfig(32, 32, 4, 1)
    if max_seq_len <= 32:
        return PackedConfig(16 if max_seq_len <= 16 else 32, 32, 2, 2)
    if max_seq_len <= 64 or wide > 256:
        return PackedConfig(64, 32 if wide > 256 else 64, 4, 2)
    return PackedConfig(128, 64, 8 if wide > 128 else 4, 3)


def packed_attention_reference(qkv: Tensor, starts: Tensor, rules: ScoreRules, num_heads: int) -> Tensor:
    """As `packed_attention`, sequence by sequence; returns [tokens, heads * head_dim]."""
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = (all_heads - num_heads) // 2
    out = torch.zeros(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    for start, end in itertools.pairwise(starts.tolist()):
        q, k, v = qkv[start:end].transpose(0, 1).split((num_heads, kv_heads, kv_heads))
        k, v = (one.repeat_interleave(num_heads // kv_heads, 0) for one in (k, v))
        scores = q @ k.mT * rules.scale
        if rules.window is not None:
            place = torch.arange(end - start, device=qkv.device)
            far = (place[:, None] - place).abs() >= rules.window
            scores = scores.masked_fill(far, float("-inf"))
        out[start:end] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out.flatten(1)


@triton.jit
def _is_behind(starts_ptr, num_seqs, tile, BLOCK_M: tl.constexpr):
    """Whether all sequences that a query tile may be of are empty, as those that pad a step are: it needs no search."""
    end = tl.load(starts_ptr + num_seqs)
    earliest = tile - end // BLOCK_M  # sequence: tiles of earlier ones end before
    return (earliest >= 0) & (tl.load(starts_ptr + tl.minimum(tl.maximum(earliest, 0), num_seqs)) >= end)


@triton.jit
def _find_tile(starts_ptr, num_seqs, tile, BLOCK_M: tl.constexpr):
    """Returns a query tile's sequence as its first row and length, and the tile's first query in it.

    Sequence i has the tiles from starts[i] // BLOCK_M + i on: as many as it can need.
    """
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = tl.load(starts_ptr + middle) // BLOCK_M + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle - 1)
    start = tl.load(starts_ptr + low)
    length = tl.load(starts_ptr + low + 1) - start
    return start, length, (tile - (start // BLOCK_M + low)) * BLOCK_M


@triton.jit
def _add_keys(
    q, acc, l_i, m_i, k_ptr, v_ptr, queries, begin, stop, length, stride, scale,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Adds the keys from `begin` to `stop` of a sequence to the sums of a query tile."""
    dims = tl.arange(0, DIM)
    for first in range(begin, stop, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        rows = keys.to(tl.int64)[:, None] * stride + dims[None, :]
        if MASKED or HEAD_DIM != DIM:
            inside = (keys < length)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + rows, mask=inside, other=0.0)
        else:
            k = tl.load(k_ptr + rows)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            visible = (keys < length)[None, :]
            if WINDOW > 0:
                visible &= tl.abs(queries[:, None] - keys[None, :]) < WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1) * scale)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # rows that have seen no key yet
        p = tl.exp2(scores * scale - base[:, None])  # scaled here, where it takes no instruction of its own
        alpha = tl.exp2(m_i - base)
        l_i = l_i * alpha + tl.sum(p, 1)
        if MASKED or HEAD_DIM != DIM:  # noqa: SIM108 - two kernels, and no choice when one runs
            v = tl.load(v_ptr + rows, mask=inside, other=0.0)
        else:
            v = tl.load(v_ptr + rows)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["starts_ptr", "out_ptr"])
def _packed_attention_kernel(
    qkv_ptr, starts_ptr, out_ptr, stride, num_seqs, scale,
    WINDOW: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # program (i, j): head i of query tile j
    head = tl.program_id(0)
    if _is_behind(starts_ptr, num_seqs, tl.program_id(1), BLOCK_M):
        return
    start, length, start_m = _find_tile(starts_ptr, num_seqs, tl.program_id(1), BLOCK_M)
    if start_m >= length:
        return
    kv_head = head // (HEADS // KV_HEADS)
    dims = tl.arange(0, DIM)
    queries = start_m + tl.arange(0, BLOCK_M)
    inside = (queries < length)[:, None] & (dims < HEAD_DIM)[None, :]
    sequence = qkv_ptr + start.to(tl.int64) * stride
    q_rows = queries.to(tl.int64)[:, None] * stride + head * HEAD_DIM + dims[None, :]
    q = tl.load(sequence + q_rows, mask=inside, other=0.0)
    k_ptr = sequence + (HEADS + kv_head) * HEAD_DIM
    v_ptr = sequence + (HEADS + KV_HEADS + kv_head) * HEAD_DIM
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    if WINDOW > 0:
        begin = tl.maximum(start_m - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        stop = tl.minimum(start_m + BLOCK_M - 1 + WINDOW, length)
        acc, l_i, _ = _add_keys(
            q, acc, l_i, m_i, k_ptr, v_ptr, queries, begin, stop, length, stride, scale, True, WINDOW, HEAD_DIM, DIM,
            BLOCK_N,
        )  # fmt: skip
    else:
        whole = length // BLOCK_N * BLOCK_N
        acc, l_i, m_i = _add_keys(
            q, acc, l_i, m_i, k_ptr, v_ptr, queries, 0, whole, length, stride, scale, False, 0, HEAD_DIM, DIM, BLOCK_N
        )
        acc, l_i, _ = _add_keys(
            q, acc, l_i, m_i, k_ptr, v_ptr, queries, whole, length, length, stride, scale, True, 0, HEAD_DIM, DIM,
            BLOCK_N,
        )  # fmt: skip
    acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]  # a padding query may see no key
    out_rows = (start + queries).to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + out_rows, acc, mask=inside)


def packed_attention(
    qkv: Tensor, starts: Tensor, rules: ScoreRules, num_heads: int, max_seq_len: int, out: Tensor
) -> None:
    """Attention of each token to the tokens of its sequence, on both sides.

    qkv [tokens, heads + 2 * kv_heads, head_dim], rows may be strided. starts [num_seqs + 1] int32, on the device: first
    row of each sequence, then the end of the last one. rules: scale and window; a token sees the keys whose distance
    is below the window. max_seq_len: of the longest sequence, which only decides the tiles. out [tokens, heads *
    head_dim], contiguous: rows of no sequence are not written. Raises ValueError for other shapes, dtypes and rules.
    """
    tokens, all_heads, head_dim = qkv.shape
    kv_heads = (all_heads - num_heads) // 2
    if kv_heads < 1 or num_heads + 2 * kv_heads != all_heads or num_heads % kv_heads:
        raise ValueError(f"qkv: {all_heads} heads are not {num_heads} of q and those of k and v")
    if head_dim % 8 or head_dim > LARGEST_HEAD:
        raise ValueError(f"qkv: heads of {head_dim} numbers; a multiple of 8 up to {LARGEST_HEAD} is needed")
    if qkv.dtype not in DTYPES or qkv.stride(2) != 1 or qkv.stride(1) != head_dim:
        raise ValueError(f"qkv: expected contiguous heads of floats, got strides {qkv.stride()} of {qkv.dtype}")
    if not rules.both_sides or rules.soft_cap is not None or rules.sinks is not None or rules.chunked:
        raise ValueError("rules: packed attention is of both sides, and has neither soft caps nor sinks nor chunks")
    check_tensor("out", out, (tokens, num_heads * head_dim), qkv.dtype)
    check_tensor("starts", starts, tuple(starts.shape), torch.int32)
    num_seqs = len(starts) - 1
    if num_seqs < 1 or not tokens:
        return
    config = choose_config(head_dim, qkv.dtype, max_seq_len)
    _packed_attention_kernel[(num_heads, tokens // config.block_m + num_seqs)](
        qkv, starts, out, qkv.stride(0), num_seqs, rules.scale * LOG2E,
        WINDOW=rules.window or 0, HEADS=num_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        DIM=max(triton.next_power_of_2(head_dim), 16), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
