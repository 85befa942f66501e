"""Batch-invariant attention over latent rows: a row's result depends on that row alone, to the last bit; on a GPU.

Decodes and prefills take the same inner loop as `latent_decode`, one new token a program, so that no tile has rows of
two tokens. Keys are divided at multiples of a fixed length and combined in order, as in `batch_invariant`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.attention.attention_tiles import LOG2E
from blockyard.kernels.attention.batch_invariant import combine_in_order_kernel, rescale
from blockyard.kernels.attention.latent.latent_decode import (
    attend_rows,
    check_latent_inputs,
    choose_config,
    load_query,
)
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

_MAX_SPLITS = 16  # of the longest sequence: a split of a head has 2 KiB of sums
_MIN_SPLIT_LEN = 512  # keys


def split_len(max_seq_len: int) -> int:
    """Keys of a split where positions are at most `max_seq_len`, which must be the same in all steps."""
    return max(_MIN_SPLIT_LEN, next_power_of_2(ceil_div(max_seq_len, _MAX_SPLITS)))


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "out_ptr"])
def _latent_invariant_kernel(
    q_ptr, rotated_ptr, layer_ptr, slots_ptr, positions_ptr, tables_ptr, out_ptr, ml_ptr, scales_ptr, q_row, q_head,
    rotated_row, rotated_head, table_stride, scale,
    SCALED: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, LATENT: tl.constexpr, DIM: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_LEN: tl.constexpr, SPLIT_KV: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    # program (i, j, k): heads j of row i; if SPLIT_KV splits k, k + programs, ..., else all
    row = tl.program_id(0).to(tl.int64)
    heads, dims = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    slot = tl.load(slots_ptr + row)
    end = tl.where(slot < 0, 0, tl.load(positions_ptr + row).to(tl.int32) + 1)
    row_scale = 1.0
    if SCALED:
        row_scale = tl.load(scales_ptr)
        scale *= row_scale
    q, q_rotated = load_query(
        q_ptr, q_row, q_head, rotated_ptr, rotated_row, rotated_head, row, heads, HEADS, LATENT, DIM, ROTATED,
        ROTATED_DIM,
    )  # fmt: skip
    inside = (heads < HEADS)[:, None] & (dims < LATENT)[None, :]
    out_row = row * HEADS + heads
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for split in range(tl.program_id(2), tl.cdiv(end, SPLIT_LEN), tl.num_programs(2)):
        split_acc, split_l, split_m = attend_rows(
            q, q_rotated, split * SPLIT_LEN, tl.minimum((split + 1) * SPLIT_LEN, end),
            tables_ptr + slot * table_stride, layer_ptr, scale, BLOCK_M, LATENT, DIM, ROTATED, ROTATED_DIM, BLOCK_SIZE,
            BLOCK_N,
        )  # fmt: skip
        if SPLIT_KV:
            split_row = out_row * MAX_SPLITS + split
            tl.store(out_ptr + split_row[:, None] * LATENT + dims[None, :], split_acc, mask=inside)
            tl.store(ml_ptr + 2 * split_row, split_l, mask=heads < HEADS)
            tl.store(ml_ptr + 2 * split_row + 1, split_m, mask=heads < HEADS)
        else:
            alpha, split_alpha, m_i = rescale(m_i, split_m)
            l_i = tl.fma(split_l, split_alpha, l_i * alpha)
            factors = tl.zeros_like(split_acc) + split_alpha[:, None]
            acc = tl.fma(split_acc, factors, acc * alpha[:, None])
    if not SPLIT_KV:
        acc = acc * (row_scale / tl.where(l_i > 0, l_i, 1.0))[:, None]
        tl.store(out_ptr + out_row[:, None] * LATENT + dims[None, :], acc, mask=inside)


def latent_invariant(
    q_latent: Tensor,
    q_rotated: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    scale: float,
    max_seq_len: int,
    is_decode: bool,
    scales: Tensor | None = None,
) -> Tensor:
    """Computes `latent_decode`, except that `max_seq_len` must be the same in all steps.

    Rows may be of decodes or of prefills, whose rows are all in the cache. is_decode: splits of a row are programs of
    their own, which takes memory for their sums. Raises ValueError for other shapes and dtypes.
    """
    rows, heads, latent_dim = q_latent.shape
    rotated, split = q_rotated.shape[2], split_len(max_seq_len)
    check_latent_inputs(q_latent, q_rotated, layer, metadata, scales)
    out = q_latent.new_empty((rows, heads, latent_dim))
    if not rows:
        return out
    config, max_splits = choose_config(heads, q_latent.dtype), ceil_div(max_seq_len, split)
    dim, target, ml = max(next_power_of_2(latent_dim), 16), out, out
    if is_decode:
        target = torch.empty((rows, heads, max_splits, latent_dim), dtype=torch.float32, device=out.device)
        ml = torch.empty((rows, heads, max_splits, 2), dtype=torch.float32, device=out.device)
    _latent_invariant_kernel[(rows, ceil_div(heads, config.heads), max_splits if is_decode else 1)](
        q_latent, q_rotated, layer, metadata.slots, metadata.positions, metadata.tables, target, ml,
        q_latent if scales is None else scales, *q_latent.stride()[:2], *q_rotated.stride()[:2],
        metadata.tables.stride(0), scale * LOG2E,
        SCALED=scales is not None, HEADS=heads, BLOCK_M=config.heads, LATENT=latent_dim, DIM=dim, ROTATED=rotated,
        ROTATED_DIM=max(next_power_of_2(rotated), 16), BLOCK_SIZE=layer.shape[3], BLOCK_N=config.keys,
        SPLIT_LEN=split, SPLIT_KV=is_decode, MAX_SPLITS=max_splits, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if is_decode:
        # it reads the scale of V behind that of K: both are the row's
        combine_in_order_kernel[(rows, heads)](
            metadata.slots, metadata.positions, target, ml, q_latent if scales is None else scales, out,
            SCALED=scales is not None, WINDOW=0, CHUNKED=False, HEADS=heads, HEAD_DIM=latent_dim, DIM=dim,
            SPLIT_LEN=split, MAX_SPLITS=max_splits, num_warps=4,
        )  # fmt: skip
    return out
