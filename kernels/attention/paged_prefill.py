"""Prefill attention over the paged KV cache: several new tokens a sequence; on a GPU.

After FlashAttention-2 (https://arxiv.org/abs/2307.08691): a tile of queries passes over its keys once, with an online
softmax. Tokens and the query heads that share a K/V head are the rows of one tile. Key tiles are masked only where
some row does not see all of it. Where there are few query tiles with many keys, several programs share each
(`prefill_splits`).
"""

import itertools
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
from blockyard.kernels.attention.prefill_splits import split_prefill
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.attention.torch_sdpa import softmax_with_sinks
from blockyard.kernels.kv_cache.kv_types import dequantized_reference
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata, check_attention_inputs, check_query_ranges


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Tile sizes and launch options of the kernel."""

    block_m: int  # rows of a query tile, each a token and head
    block_n: int  # keys of a tile
    warps: int
    stages: int
    programs: int = 2  # that run at a time on a multiprocessor
    key_us: float = 0.04  # us a key of a program


def choose_config(head_dim: int, dtype: torch.dtype) -> PrefillConfig:
    """The config that fits shared memory and registers."""
    wide = head_dim * dtype.itemsize
    if head_dim > 256:  # 192 KiB of shared memory, and accumulators that take half of the registers
        return PrefillConfig(64, 32, 8, 2, 1) if dtype.itemsize <= 2 else PrefillConfig(16, 16, 8, 1, 1)
    if wide <= 256 and dtype.itemsize <= 2:
        return PrefillConfig(128, 64, 4, 3)
    return PrefillConfig(64, 32, 4, 2 if wide <= 512 else 1)


def paged_prefill_reference(
    q: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    query_start_loc: Tensor,
    rules: ScoreRules,
) -> Tensor:
    (kv_heads, block_size, head_dim), window = layer.shape[2:], rules.window
    layer = dequantized_reference(layer, rules.kv_scales, q.dtype)
    out = torch.zeros_like(q)
    bounds = query_start_loc.tolist()
    for start, end in itertools.pairwise(bounds):
        slot, first = (int(metadata.slots[start]), int(metadata.positions[start])) if start < end else (-1, 0)
        if slot < 0:
            continue
        length = first + end - start
        blocks = metadata.tables[slot, : (length - 1) // block_size + 1].long()
        keys, values = layer[blocks].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :length]
        grouped = q[start:end].view(end - start, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        scores = grouped @ keys.mT[:, None] * rules.scale
        if rules.soft_cap is not None:
            scores = rules.soft_cap * (scores / rules.soft_cap).tanh()
        position = torch.arange(first, length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        visible = key <= position
        if window is not None:
            visible &= key >= (position // window * window if rules.chunked else position - window + 1)
        of_heads = None if rules.sinks is None else rules.sinks.view(kv_heads, -1, 1, 1)
        p = softmax_with_sinks(scores.masked_fill(~visible, float("-inf")), of_heads)
        hidden = torch.where(visible.any(0)[:, None], values, 0)  # values that no row sees may be NaN
        out[start:end] = (p @ hidden[:, None]).permute(2, 0, 1, 3).reshape(end - start, -1, head_dim)
    return out[bounds[0] :].flatten(1)


@triton.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "query_start_ptr", "out_ptr"],
)
def _paged_prefill_kernel(
    q_ptr, layer_ptr, slots_ptr, positions_ptr, tables_ptr, query_start_ptr, out_ptr, lse_ptr, scales_ptr, q_stride,
    table_stride, num_seqs, scale,
    SCALED: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_KV: tl.constexpr, sinks_ptr=None,
):  # fmt: skip
    # program (i, j, k): split k of the keys of K/V head i of query tile j from the end: the longest come first
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    _, start, row_end, start_m = find_query_tile(query_start_ptr, num_seqs, tile, GROUP, BLOCK_M)
    num_m = (row_end - start) * GROUP
    if start_m >= num_m:
        return
    slot, context_len, offs_m, positions, end = query_positions(
        slots_ptr, positions_ptr, start, start_m, num_m, GROUP, BLOCK_M
    )
    first_position = context_len + start_m // GROUP
    begin, unmasked_from = 0, 0
    if WINDOW > 0:
        begin = oldest_key(first_position, WINDOW, CHUNKED) // BLOCK_N * BLOCK_N
        unmasked_from = tl.cdiv(oldest_key(tl.maximum(end - 1, 0), WINDOW, CHUNKED), BLOCK_N) * BLOCK_N
    stop = end
    if SPLIT_KV:
        split_keys = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), tl.num_programs(2)) * BLOCK_N
        begin += tl.program_id(2) * split_keys
        stop = tl.minimum(begin + split_keys, end)
    unmasked_to = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, stop), begin)

    v_scale = 1.0
    if SCALED:
        scale *= tl.load(scales_ptr)
        v_scale = tl.load(scales_ptr + 1)
    dims = tl.arange(0, DIM)
    q, row, heads, inside = load_queries(q_ptr, q_stride, start, offs_m, num_m, head, GROUP, HEAD_DIM, DIM)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    table = tables_ptr + slot * table_stride
    if WINDOW > 0:
        masked_to = tl.maximum(tl.minimum(unmasked_from, unmasked_to), begin)
        acc, l_i, m_i = attention_inner_loop(
            q, acc, l_i, m_i, positions, begin, masked_to, end, table, layer_ptr, head, scale, True, WINDOW, CHUNKED,
            CAP, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        begin = masked_to
    acc, l_i, m_i = attention_inner_loop(
        q, acc, l_i, m_i, positions, begin, unmasked_to, end, table, layer_ptr, head, scale, False, WINDOW, CHUNKED,
        CAP, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    acc, l_i, m_i = attention_inner_loop(
        q, acc, l_i, m_i, positions, unmasked_to, stop, end, table, layer_ptr, head, scale, True, WINDOW, CHUNKED,
        CAP, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, BLOCK_N,
    )  # fmt: skip
    if not SPLIT_KV:
        l_i = add_sinks(l_i, m_i, sinks_ptr, heads, 1, KV_HEADS * GROUP)
    acc = acc * (v_scale / tl.where(l_i > 0, l_i, 1.0))[:, None]  # zeros where a row sees no key
    out_row = (row - tl.load(query_start_ptr)) * (KV_HEADS * GROUP) + heads
    if SPLIT_KV:
        out_row = out_row * tl.num_programs(2) + tl.program_id(2)
        tl.store(lse_ptr + out_row, m_i + tl.log2(tl.where(l_i > 0, l_i, 1.0)), mask=offs_m < num_m)
    tl.store(out_ptr + out_row[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)


def paged_prefill(
    q: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    query_start_loc: Tensor,
    rules: ScoreRules,
    max_seq_len: int,
    out: Tensor,
) -> None:
    """Causal attention of the rows from query_start_loc[0] on, whose K and V are all in the cache already.

    q [rows, heads, head_dim], rows may be strided; layer [num_blocks, 2, kv_heads, block_size, head_dim].
    query_start_loc [num_seqs + 1] int32: first row of each sequence, then `rows`; rows of a sequence are adjacent, in
    the order of their positions. max_seq_len: a bound of positions, which only decides how work is shared. out [rows -
    query_start_loc[0], heads * head_dim], contiguous, is written whole, with zeros for padding sequences. Blocks,
    positions and query_start_loc are not checked on device. Raises ValueError for other shapes and dtypes.
    """
    (_, heads, head_dim), kv_heads = q.shape, layer.shape[2]
    check_attention_inputs(q, layer, metadata, rules.kv_scales)
    check_query_ranges(q, query_start_loc, out)
    num_seqs, config = len(query_start_loc) - 1, choose_config(head_dim, q.dtype)
    if num_seqs < 1 or not len(out):
        return
    splits = split_prefill(q, kv_heads, rules, max_seq_len, out, config.block_m, config.programs, config.key_us)
    arguments, constants = launch_arguments(q, layer, metadata, query_start_loc, rules, splits.out, splits.lse)
    tiles = len(out) * (heads // kv_heads) // config.block_m + num_seqs
    _paged_prefill_kernel[(kv_heads, tiles, splits.num)](
        *arguments,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, SPLIT_KV=splits.num > 1, num_warps=config.warps,
        num_stages=config.stages, **constants,
    )  # fmt: skip
    splits.combine(out, rules)
