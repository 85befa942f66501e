"""Batch-invariant attention over latent rows: a row's result depends on that row alone, to the last bit; on a GPU.

Decodes and prefills take the same inner loop as `latent_decode`, one new token a program, so that no tile has rows of
two tokens. Keys are divided at multiples of a fixed length and combined in order, as in `batch_invariant`.
"""

import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.attention.batch_invariant import (
    add_split,
    combine_in_order,
    split_buffers,
    split_len,
    store_split,
)
from blockyard.kernels.attention.latent.latent_decode import (
    attend_rows,
    check_latent_inputs,
    choose_config,
    load_query,
)
from blockyard.kernels.attention.score_rules import LOG2E, ScoreRules
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

_MAX_SPLITS = 16  # of the longest sequence: a split of a head has 2 KiB of sums


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
            store_split(
                split_acc, split_l, split_m, out_row, split, dims, inside, heads < HEADS, out_ptr, ml_ptr, LATENT,
                MAX_SPLITS,
            )  # fmt: skip
        else:
            acc, l_i, m_i = add_split(acc, l_i, m_i, split_acc, split_l, split_m)
    if not SPLIT_KV:
        acc = acc * (row_scale / tl.where(l_i > 0, l_i, 1.0))[:, None]
        tl.store(out_ptr + out_row[:, None] * LATENT + dims[None, :], acc, mask=inside)


def latent_invariant(
    q_latent: Tensor,
    q_rotated: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rules: ScoreRules,
    max_seq_len: int,
    is_decode: bool,
) -> Tensor:
    """Computes `latent_decode`, except that `max_seq_len` must be the same in all steps.

    Rows may be of decodes or of prefills, whose rows are all in the cache. is_decode: splits of a row are programs of
    their own, which takes memory for their sums. Raises ValueError for other shapes and dtypes.
    """
    (rows, heads, latent_dim), rotated, scales = q_latent.shape, q_rotated.shape[2], rules.kv_scales
    split = split_len(max_seq_len, _MAX_SPLITS)
    check_latent_inputs(q_latent, q_rotated, layer, metadata, scales)
    out = q_latent.new_empty((rows, heads, latent_dim))
    if not rows:
        return out
    config = choose_config(heads, q_latent.dtype)
    max_splits = ceil_div(max_seq_len, split)
    partial_out, ml = split_buffers(q_latent, latent_dim, max_splits) if is_decode else (out, out)
    _latent_invariant_kernel[(rows, ceil_div(heads, config.heads), max_splits if is_decode else 1)](
        q_latent, q_rotated, layer, metadata.slots, metadata.positions, metadata.tables, partial_out, ml,
        q_latent if scales is None else scales, *q_latent.stride()[:2], *q_rotated.stride()[:2],
        metadata.tables.stride(0), rules.scale * LOG2E,
        SCALED=scales is not None, HEADS=heads, BLOCK_M=config.heads, LATENT=latent_dim,
        DIM=max(next_power_of_2(latent_dim), 16), ROTATED=rotated, ROTATED_DIM=max(next_power_of_2(rotated), 16),
        BLOCK_SIZE=layer.shape[3], BLOCK_N=config.keys, SPLIT_LEN=split, SPLIT_KV=is_decode,
        MAX_SPLITS=max_splits, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if is_decode:  # the scale of V is that of K: the row's
        combine_in_order(partial_out, ml, metadata, rules, split, out, num_warps=4)
    return out
