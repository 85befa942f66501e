"""Prefill attention over decompressed K and V of latent attention: one piece of the keys a call; on a GPU.

As `paged_prefill`, but K and V are not paged and differ in size, and the rotated part of K is one for all heads. A call
attends to a piece of the tokens before a step, or to the new tokens themselves, causally. What it has summed is kept,
normalised, with its log-sum-exp: the next call begins its online softmax from there.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.attention.attention_tiles import find_query_tile
from blockyard.kernels.attention.score_rules import LOG2E, ScoreRules
from blockyard.kernels.int_math import next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata, check_query_ranges


@dataclass(frozen=True, slots=True)
class LatentPrefillConfig:
    """Tile sizes and launch options of the kernel."""

    block_m: int  # query rows of a tile
    block_n: int  # keys of a tile
    warps: int
    stages: int


def choose_config(dtype: torch.dtype, numbers: int) -> LatentPrefillConfig:
    """The config that fits shared memory and registers. numbers: of a key and its value, with padding."""
    if dtype.itemsize > 2:
        return LatentPrefillConfig(64, 16, 4, 1)
    return LatentPrefillConfig(128, 64, 8, 3) if numbers <= 320 else LatentPrefillConfig(128, 32, 8, 2)


@dataclass(frozen=True, slots=True)
class KeyPiece:
    """A piece of the tokens that are cached before a step, of each of its sequences."""

    first: int  # position of its first token
    tokens: int  # of a sequence in the buffers of K and V, where a shorter context leaves the end unused


@dataclass(frozen=True, slots=True)
class PrefillState:
    """Sums over earlier pieces, per token and head."""

    out: Tensor  # [tokens, heads, value] float32
    lse: Tensor  # [tokens, heads] float32, log2 of the sum of exponentials

    @staticmethod
    def make(tokens: int, heads: int, value_dim: int, device: torch.device) -> "PrefillState":
        out = torch.empty((tokens, heads, value_dim), dtype=torch.float32, device=device)
        return PrefillState(out, torch.empty((tokens, heads), dtype=torch.float32, device=device))


@triton.jit
def _attend_keys(
    q, q_rotated, acc, l_i, m_i, queries, begin, stop, end, kv_ptr, kv_stride, rotated_ptr, rotated_stride, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, PLAIN: tl.constexpr, PLAIN_DIM: tl.constexpr, ROTATED: tl.constexpr,
    ROTATED_DIM: tl.constexpr, VALUE: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles from `begin` to `stop`: returns acc, l_i and m_i. No key from `end` on is read.

    Rows behind `end` belong to other sequences and may not be finite.
    """
    plain, turned, values = tl.arange(0, PLAIN_DIM), tl.arange(0, ROTATED_DIM), tl.arange(0, VALUE_DIM)
    for start in range(begin, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        valid = keys < end
        places = kv_ptr + keys.to(tl.int64)[None, :] * kv_stride
        rotated_places = rotated_ptr + keys.to(tl.int64)[None, :] * rotated_stride + turned[:, None]
        value_places = kv_ptr + keys.to(tl.int64)[:, None] * kv_stride + PLAIN + values[None, :]
        if MASK or PLAIN_DIM > PLAIN or ROTATED_DIM > ROTATED or VALUE_DIM > VALUE:
            k = tl.load(places + plain[:, None], mask=valid[None, :] & (plain < PLAIN)[:, None], other=0.0)
            k_rotated = tl.load(rotated_places, mask=valid[None, :] & (turned < ROTATED)[:, None], other=0.0)
            v = tl.load(value_places, mask=valid[:, None] & (values < VALUE)[None, :], other=0.0)
        else:
            k = tl.load(places + plain[:, None])
            k_rotated = tl.load(rotated_places)
            v = tl.load(value_places)
        scores = tl.dot(q, k, input_precision="ieee")
        scores = tl.dot(q_rotated, k_rotated, acc=scores, input_precision="ieee") * scale
        if MASK:
            visible = valid[None, :]
            if CAUSAL:
                visible = visible & (keys[None, :] <= queries[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))  # finite: each row sees the first key of the first tile
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc=acc * alpha[:, None], input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(
    do_not_specialize=["num_seqs", "first_key", "piece_tokens"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "query_start_ptr", "out_ptr"],
)
def _latent_prefill_kernel(
    q_ptr, kv_ptr, rotated_ptr, slots_ptr, positions_ptr, query_start_ptr, out_ptr, state_ptr, lse_ptr, q_stride,
    kv_stride, rotated_stride, num_seqs, first_key, piece_tokens, scale,
    CAUSAL: tl.constexpr, RESUME: tl.constexpr, FINISH: tl.constexpr, HEADS: tl.constexpr, PLAIN: tl.constexpr,
    PLAIN_DIM: tl.constexpr, ROTATED: tl.constexpr, ROTATED_DIM: tl.constexpr, VALUE: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # program (i, j): query tile i from the end, so that the longest come first, of head j
    tile, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    seq, start, row_end, start_m = find_query_tile(query_start_ptr, num_seqs, tile, 1, BLOCK_M)
    num_m = row_end - start
    if start_m >= num_m:
        return
    offs_m = start_m + tl.arange(0, BLOCK_M)
    before = start - tl.load(query_start_ptr)  # rows of earlier sequences
    if CAUSAL:
        end = tl.minimum(start_m + BLOCK_M, num_m)
        unmasked_to = (start_m + 1) // BLOCK_N * BLOCK_N
        key_row = before.to(tl.int64)
    else:
        end = tl.minimum(tl.maximum(tl.load(positions_ptr + start).to(tl.int32) - first_key, 0), piece_tokens)
        unmasked_to = end // BLOCK_N * BLOCK_N
        key_row = seq.to(tl.int64) * piece_tokens
    if tl.load(slots_ptr + start) < 0:
        end, unmasked_to = 0, 0

    plain, turned, values = tl.arange(0, PLAIN_DIM), tl.arange(0, ROTATED_DIM), tl.arange(0, VALUE_DIM)
    exists = offs_m < num_m
    q_places = q_ptr + (start + offs_m).to(tl.int64)[:, None] * q_stride + head * (PLAIN + ROTATED)
    q = tl.load(q_places + plain[None, :], mask=exists[:, None] & (plain < PLAIN)[None, :], other=0.0)
    in_rotated = exists[:, None] & (turned < ROTATED)[None, :]
    q_rotated = tl.load(q_places + PLAIN + turned[None, :], mask=in_rotated, other=0.0)
    out_row = (before + offs_m).to(tl.int64) * HEADS + head
    inside = exists[:, None] & (values < VALUE)[None, :]
    out_places = out_row[:, None] * VALUE + values[None, :]
    if RESUME:
        m_i = tl.load(lse_ptr + out_row, mask=exists, other=float("-inf"))
        l_i = tl.where(m_i > float("-inf"), 1.0, 0.0)
        acc = tl.load(state_ptr + out_places, mask=inside, other=0.0)
    else:
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, VALUE_DIM], tl.float32)
    kv_ptr += key_row * kv_stride + head * (PLAIN + VALUE)
    rotated_ptr += key_row * rotated_stride
    acc, l_i, m_i = _attend_keys(
        q, q_rotated, acc, l_i, m_i, offs_m, 0, unmasked_to, end, kv_ptr, kv_stride, rotated_ptr, rotated_stride, scale,
        False, CAUSAL, PLAIN, PLAIN_DIM, ROTATED, ROTATED_DIM, VALUE, VALUE_DIM, BLOCK_N,
    )  # fmt: skip
    acc, l_i, m_i = _attend_keys(
        q, q_rotated, acc, l_i, m_i, offs_m, unmasked_to, end, end, kv_ptr, kv_stride, rotated_ptr, rotated_stride,
        scale, True, CAUSAL, PLAIN, PLAIN_DIM, ROTATED, ROTATED_DIM, VALUE, VALUE_DIM, BLOCK_N,
    )  # fmt: skip
    acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]  # zeros where a row sees no key
    if FINISH:
        tl.store(out_ptr + out_places, acc, mask=inside)
    else:
        tl.store(state_ptr + out_places, acc, mask=inside)
        tl.store(lse_ptr + out_row, tl.where(l_i > 0, m_i + tl.log2(tl.where(l_i > 0, l_i, 1.0)), m_i), mask=exists)


def latent_prefill(
    query: Tensor,
    kv: Tensor,
    k_rotated: Tensor,
    metadata: PagedKVMetadata,
    query_start_loc: Tensor,
    rules: ScoreRules,
    out: Tensor,
    piece: KeyPiece | None = None,
    state: PrefillState | None = None,
    resume: bool = False,
) -> None:
    """Attends to one piece of the keys of the rows from query_start_loc[0] on.

    query [rows, heads, plain + rotated] and k_rotated [keys, rotated], of which the rows may be strided; kv [keys,
    heads, plain + value], contiguous; query_start_loc [num_seqs + 1] int32: see `paged_prefill`. piece None: the keys
    are the new tokens, in the order of their rows, and attention is causal; it ends with `out` [rows -
    query_start_loc[0], heads * value], contiguous, written whole, with zeros for padding sequences. Otherwise the keys
    are `piece.tokens` of each sequence, and all rows see those before their first; the sums go to `state`. resume:
    begins with the sums in `state`. Contents are not checked on device. Raises ValueError for other shapes and dtypes.
    """
    heads, query_dim = query.shape[1:]
    rotated = k_rotated.shape[1]
    plain = query_dim - rotated
    value, num_seqs = kv.shape[2] - plain, len(query_start_loc) - 1
    metadata.check(len(query))
    check_query_ranges(query[..., :1].expand(-1, -1, value), query_start_loc, out)
    if kv.shape[1] != heads or not kv.is_contiguous() or len(k_rotated) != len(kv) or min(plain, value, rotated) < 1:
        raise ValueError(f"kv {list(kv.shape)}, rotated {list(k_rotated.shape)} do not fit {list(query.shape)}")
    if query.stride()[1:] != (query_dim, 1) or k_rotated.stride(1) != 1:
        raise ValueError(f"a token must be contiguous, got strides {query.stride()}, {k_rotated.stride()}")
    if not query.dtype == kv.dtype == k_rotated.dtype:
        raise ValueError(f"query is {query.dtype}, kv {kv.dtype}, its rotated part {k_rotated.dtype}")
    if len(kv) < (len(out) if piece is None else num_seqs * piece.tokens):
        raise ValueError(f"{len(kv)} keys are too few")
    if (piece is not None or resume) and (state is None or state.out.shape != (len(out), heads, value)):
        raise ValueError("the state has another shape")
    if num_seqs < 1 or not len(out):
        return
    plain_dim, rotated_dim, value_dim = (max(next_power_of_2(n), 16) for n in (plain, rotated, value))
    config = choose_config(query.dtype, plain_dim + rotated_dim + value_dim)
    sums = (out, out) if state is None else (state.out, state.lse)
    _latent_prefill_kernel[(len(out) // config.block_m + num_seqs, heads)](
        query, kv, k_rotated, metadata.slots, metadata.positions, query_start_loc, out, *sums, query.stride(0),
        kv.stride(0), k_rotated.stride(0), num_seqs, 0 if piece is None else piece.first,
        0 if piece is None else piece.tokens, rules.scale * LOG2E,
        CAUSAL=piece is None, RESUME=resume, FINISH=piece is None, HEADS=heads, PLAIN=plain, PLAIN_DIM=plain_dim,
        ROTATED=rotated, ROTATED_DIM=rotated_dim, VALUE=value, VALUE_DIM=value_dim, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
