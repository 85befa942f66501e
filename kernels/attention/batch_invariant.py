"""Batch-invariant attention: a row's result depends on that row alone, to the last bit; on a GPU.

One kernel computes decodes and prefills with one tile size. Keys are divided at multiples of a fixed length. Each
split of a row is computed independently, and splits are combined in their order: in one program, or for decodes by a
second kernel with the same operations. Splits and tiles of which a row sees no key do not change its bits: their p is
0, and the accumulator is multiplied by 1.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.attention.attention_tiles import (
    add_sinks,
    attention_inner_loop,
    find_query_tile,
    launch_arguments,
    load_queries,
    oldest_key,
    query_positions,
)
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata, check_attention_inputs, check_query_ranges

_MAX_SPLITS = 64  # of the longest sequence
_MIN_SPLIT_LEN = 512  # keys


@dataclass(frozen=True, slots=True)
class InvariantConfig:
    """Tile sizes and launch options for one head size and dtype, of decodes and prefills."""

    block_m: int  # rows of a query tile, each a token and head
    block_n: int  # keys of a tile
    warps: int
    stages: int


def choose_config(head_dim: int, dtype: torch.dtype) -> InvariantConfig:
    """The config that fits shared memory and registers."""
    wide = next_power_of_2(head_dim) * dtype.itemsize
    if head_dim > 256:
        return InvariantConfig(32, 32, 8, 2) if dtype.itemsize <= 2 else InvariantConfig(16, 16, 8, 1)
    return InvariantConfig(64, 64, 4, 3) if wide <= 256 else InvariantConfig(64, 32, 4, 2)


def split_len(max_seq_len: int, max_splits: int) -> int:
    """Keys of a split where positions are at most `max_seq_len`, which must be the same in all steps."""
    return max(_MIN_SPLIT_LEN, next_power_of_2(ceil_div(max_seq_len, max_splits)))


@triton.jit
def add_split(acc, l_i, m_i, split_acc, split_l, split_m):
    """Adds a split to the sums of rows, acc [rows, dims]: always by the same operations."""
    alpha, split_alpha, m_i = _rescale(m_i, split_m)
    l_i = tl.fma(split_l, split_alpha, l_i * alpha)
    factors = tl.zeros_like(split_acc) + split_alpha[:, None]
    return tl.fma(split_acc, factors, acc * alpha[:, None]), l_i, m_i


@triton.jit
def store_split(
    acc, l_i, m_i, out_row, split, dims, inside, exists, out_ptr, ml_ptr, HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Stores a split of rows for `combine_in_order`. inside: elements of acc that exist, exists: rows."""
    split_row = out_row * MAX_SPLITS + split
    tl.store(out_ptr + split_row[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
    tl.store(ml_ptr + 2 * split_row, l_i, mask=exists)
    tl.store(ml_ptr + 2 * split_row + 1, m_i, mask=exists)


@triton.jit
def _rescale(m_i, other_m):
    """The factors of two parts of an online softmax in their sum, and the new maximum."""
    m_new = tl.maximum(m_i, other_m)
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    return tl.exp2(m_i - m_safe), tl.exp2(other_m - m_safe), m_new


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "query_start_ptr", "out_ptr"],
)
def _batch_invariant_kernel(
    q_ptr, layer_ptr, slots_ptr, positions_ptr, tables_ptr, query_start_ptr, out_ptr, ml_ptr, scales_ptr, q_stride,
    table_stride, num_seqs, scale,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_LEN: tl.constexpr, SPLIT_KV: tl.constexpr,
    MAX_SPLITS: tl.constexpr, sinks_ptr=None,
):  # fmt: skip
    # program (i, j, k): K/V head i of query tile j from the end; if SPLIT_KV splits k, k + programs, ..., else all
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    _, start, end_row, start_m = find_query_tile(query_start_ptr, num_seqs, tile, GROUP, BLOCK_M)
    num_m = (end_row - start) * GROUP
    if start_m >= num_m:
        return
    slot, context_len, offs_m, positions, end = query_positions(
        slots_ptr, positions_ptr, start, start_m, num_m, GROUP, BLOCK_M
    )
    begin = 0
    if WINDOW > 0:
        begin = oldest_key(context_len + start_m // GROUP, WINDOW, CHUNKED)
    v_scale = 1.0
    if SCALED:
        scale *= tl.load(scales_ptr)
        v_scale = tl.load(scales_ptr + 1)
    dims = tl.arange(0, DIM)
    q, row, heads, inside = load_queries(q_ptr, q_stride, start, offs_m, num_m, head, GROUP, HEAD_DIM, DIM)
    out_row = (row - tl.load(query_start_ptr)) * (KV_HEADS * GROUP) + heads
    table = tables_ptr + slot * table_stride
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for split in range(begin // SPLIT_LEN + tl.program_id(2), tl.cdiv(end, SPLIT_LEN), tl.num_programs(2)):
        split_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        split_l = tl.zeros([BLOCK_M], tl.float32)
        split_acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        split_acc, split_l, split_m = attention_inner_loop(
            q, split_acc, split_l, split_m, positions, split * SPLIT_LEN, tl.minimum((split + 1) * SPLIT_LEN, end),
            end, table, layer_ptr, head, scale, True, WINDOW, CHUNKED, CAP, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE,
            BLOCK_N,
        )  # fmt: skip
        if SPLIT_KV:
            store_split(
                split_acc, split_l, split_m, out_row, split, dims, inside, offs_m < num_m, out_ptr, ml_ptr, HEAD_DIM,
                MAX_SPLITS,
            )  # fmt: skip
        else:
            acc, l_i, m_i = add_split(acc, l_i, m_i, split_acc, split_l, split_m)
    if not SPLIT_KV:
        l_i = add_sinks(l_i, m_i, sinks_ptr, heads, 1, KV_HEADS * GROUP)
        acc = acc * (v_scale / tl.where(l_i > 0, l_i, 1.0))[:, None]
        tl.store(out_ptr + out_row[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "out_ptr"])
def _combine_in_order_kernel(
    slots_ptr, positions_ptr, partial_out_ptr, ml_ptr, scales_ptr, out_ptr,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, SPLIT_LEN: tl.constexpr, MAX_SPLITS: tl.constexpr, sinks_ptr=None,
):  # fmt: skip
    # program (i, j): head j of row i, its sequence's only row
    row = tl.program_id(0).to(tl.int64)
    out_row = row * HEADS + tl.program_id(1)
    end = tl.where(tl.load(slots_ptr + row) < 0, 0, tl.load(positions_ptr + row).to(tl.int32) + 1)
    begin = end * 0
    if WINDOW > 0:
        begin = oldest_key(tl.maximum(end - 1, 0), WINDOW, CHUNKED)
    v_scale = 1.0
    if SCALED:
        v_scale = tl.load(scales_ptr + 1)
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc = tl.zeros([DIM], tl.float32)
    for split in range(begin // SPLIT_LEN, tl.cdiv(end, SPLIT_LEN)):
        split_row = out_row * MAX_SPLITS + split
        split_acc = tl.load(partial_out_ptr + split_row * HEAD_DIM + dims, mask=in_head, other=0.0)
        split_l = tl.load(ml_ptr + 2 * split_row + tl.arange(0, 1))
        alpha, split_alpha, m_i = _rescale(m_i, tl.load(ml_ptr + 2 * split_row + 1 + tl.arange(0, 1)))
        l_i = tl.fma(split_l, split_alpha, l_i * alpha)
        acc = tl.fma(split_acc, tl.zeros_like(acc) + split_alpha, acc * alpha)
    l_i = add_sinks(l_i, m_i, sinks_ptr, tl.program_id(1), 1, HEADS)
    acc = acc * (v_scale / tl.where(l_i > 0, l_i, 1.0))
    tl.store(out_ptr + out_row * HEAD_DIM + dims, acc, mask=in_head)


def split_buffers(q: Tensor, size: int, max_splits: int) -> tuple[Tensor, Tensor]:
    """Where splits of heads of `size` numbers are stored: outputs, and sums of exponentials and maxima."""
    partial_out = torch.empty((*q.shape[:2], max_splits, size), dtype=torch.float32, device=q.device)
    return partial_out, torch.empty((*q.shape[:2], max_splits, 2), dtype=torch.float32, device=q.device)


def combine_in_order(
    partial_out: Tensor, ml: Tensor, metadata: PagedKVMetadata, rules: ScoreRules, split: int, out: Tensor,
    num_warps: int,
) -> None:  # fmt: skip
    """Adds the splits of `split` keys of each row up to `out`."""
    (rows, heads, max_splits, size), scales = partial_out.shape, rules.kv_scales
    _combine_in_order_kernel[(rows, heads)](
        metadata.slots, metadata.positions, partial_out, ml, partial_out if scales is None else scales, out,
        SCALED=scales is not None, WINDOW=rules.window or 0, CHUNKED=rules.chunked, HEADS=heads, HEAD_DIM=size,
        DIM=max(next_power_of_2(size), 16), SPLIT_LEN=split, MAX_SPLITS=max_splits, sinks_ptr=rules.sinks,
        num_warps=num_warps,
    )  # fmt: skip


def batch_invariant_attention(
    q: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    query_start_loc: Tensor,
    rules: ScoreRules,
    max_seq_len: int,
    out: Tensor,
    is_decode: bool,
) -> None:
    """Computes `paged_prefill`, except that `max_seq_len` must be the same in all steps.

    is_decode: each sequence has one row, and query_start_loc is 0, 1, ..., rows. Raises ValueError for other shapes and
    dtypes.
    """
    (_, heads, head_dim), kv_heads = q.shape, layer.shape[2]
    check_attention_inputs(q, layer, metadata, rules.kv_scales)
    check_query_ranges(q, query_start_loc, out)
    num_seqs, split = len(query_start_loc) - 1, split_len(max_seq_len, _MAX_SPLITS)
    if num_seqs < 1 or not len(out):
        return
    max_splits = ceil_div(max_seq_len, split)
    partial_out, ml = split_buffers(q, head_dim, max_splits) if is_decode else (out, out)
    arguments, constants = launch_arguments(q, layer, metadata, query_start_loc, rules, partial_out, ml)
    config = choose_config(head_dim, q.dtype)
    num_tiles = len(out) * (heads // kv_heads) // config.block_m + num_seqs
    _batch_invariant_kernel[(kv_heads, num_tiles, max_splits if is_decode else 1)](
        *arguments, BLOCK_M=config.block_m, BLOCK_N=config.block_n, SPLIT_LEN=split, SPLIT_KV=is_decode,
        MAX_SPLITS=max_splits, num_warps=config.warps, num_stages=config.stages, **constants,
    )  # fmt: skip
    if is_decode:
        combine_in_order(partial_out, ml, metadata, rules, split, out, num_warps=1)
