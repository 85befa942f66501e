"""Decode attention over the paged KV cache: one new token a sequence; on a GPU.

Split-KV (flash decoding): the keys of a sequence are divided into splits (`split_kv`), which a fixed number of
programs share, and the splits of a sequence are combined (`combine`). Query heads that share a K/V head are the rows
of one tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.attention.attention_tiles import add_sinks, apply_soft_cap, check_sinks
from blockyard.kernels.attention.combine import combine_if_last, combine_splits_kernel, splits_at_once
from blockyard.kernels.attention.paged_decode_fp8 import fits_decode_fp8, launch_decode_fp8
from blockyard.kernels.attention.paged_prefill import paged_prefill_reference
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.attention.split_kv import BLOCK_N, SplitKVSchedule, schedule_split_kv
from blockyard.kernels.gpu_facts import num_multiprocessors
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata, check_attention_inputs
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_PROGRAMS = 4  # a multiprocessor
_STAGES = 2
_WARPS = 4
_FEW_WARPS = 2  # where heads a K/V head are no power of 2: combining their splits needs more registers
_REGISTERS = 512  # of one lane of all warps together, so that _PROGRAMS programs fit
# The combine kernel: splits that it loads at a time, and dims of a program and of a warp. Few rows have many splits.
_FEW_ROWS = 8
_FEW_ROWS_SPLITS, _FEW_ROWS_DIMS, _FEW_ROWS_WARP_DIMS = 64, 64, 16
_SPLITS_AT_ONCE, _WARP_DIMS = 8, 128  # a warp adds splits up in registers alone
# From so many pairs of row and K/V head on the last program combines: then few rows have many splits.
_COMBINE_IN_KERNEL_PAIRS = 384
_COMBINE_IN_FP8_KERNEL_PAIRS = 128


def paged_decode_reference(q: Tensor, layer: Tensor, metadata: PagedKVMetadata, rules: ScoreRules) -> Tensor:
    starts = torch.arange(len(q) + 1, device=q.device)  # each row is a prefill of one token
    return paged_prefill_reference(q, layer, metadata, starts, rules)


@triton.jit
def _attend_split(
    q, begin, stop, table_ptr, layer_ptr, head, scale,
    CAP: tl.constexpr, BLOCK_M: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention over the keys from `begin` to `stop`: acc, l_i and m_i of FlashAttention, scores in powers of two."""
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for start in range(begin, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        valid = keys < stop
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        kv_rows = (blocks * (2 * KV_HEADS) + head) * BLOCK_SIZE + keys % BLOCK_SIZE
        k_ptr = layer_ptr + kv_rows[None, :] * HEAD_DIM + dims[:, None]
        v_ptr = layer_ptr + (kv_rows + KV_HEADS * BLOCK_SIZE)[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr, mask=valid[None, :] & in_head[:, None], other=0.0)
        v = tl.load(v_ptr, mask=valid[:, None] & in_head[None, :], other=0.0)
        k, v = k.to(q.dtype), v.to(q.dtype)  # dequantized, if the cache is 8-bit
        scores = tl.dot(q, k, input_precision="ieee")
        scores = apply_soft_cap(scores, scale, CAP)
        scores = tl.where(valid[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))  # finite: a tile has at least one key
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=["max_splits", "rows"], do_not_specialize_on_alignment=["out_ptr"])
def _paged_decode_kernel(
    q_ptr, layer_ptr, tables_ptr, work_ptr, starts_ptr, partial_out_ptr, lse_ptr, row_splits_ptr, semaphores_ptr,
    out_ptr, scales_ptr, q_stride, table_stride, max_splits, rows, scale,
    SCALED: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
    COMBINE_AT_ONCE: tl.constexpr, sinks_ptr=None,
):  # fmt: skip
    if PDL:
        gdc_wait()
    # program i: splits of program i // KV_HEADS of the schedule, for one K/V head
    group, dims = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    v_scale = 1.0
    if SCALED:
        scale *= tl.load(scales_ptr)
        v_scale = tl.load(scales_ptr + 1)
    head = tl.program_id(0) % KV_HEADS
    starts_ptr += tl.program_id(0) // KV_HEADS
    for split in range(tl.load(starts_ptr), tl.load(starts_ptr + 1)):
        item_ptr = work_ptr + split
        row = tl.load(item_ptr).to(tl.int64)
        slot = tl.load(item_ptr + max_splits).to(tl.int64)
        begin = tl.load(item_ptr + 2 * max_splits)
        stop = tl.load(item_ptr + 3 * max_splits)
        num_splits = tl.load(item_ptr + 4 * max_splits)
        heads = head * GROUP + group
        columns = heads[:, None] * HEAD_DIM + dims[None, :]
        in_group = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + row * q_stride + columns, mask=in_group, other=0.0)
        acc, l_i, m_i = _attend_split(
            q, begin, stop, tables_ptr + slot * table_stride, layer_ptr, head, scale, CAP, BLOCK_M, KV_HEADS, HEAD_DIM,
            DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        l_i = add_sinks(l_i, m_i, sinks_ptr, heads, num_splits, KV_HEADS * GROUP)
        acc = acc * (v_scale / tl.where(l_i > 0, l_i, 1.0))[:, None]  # zeros in padding rows
        if num_splits == 1:
            tl.store(out_ptr + row * (KV_HEADS * GROUP * HEAD_DIM) + columns, acc, mask=in_group)
        else:
            split_head = split * (KV_HEADS * GROUP) + heads
            partial_out = partial_out_ptr + split_head[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
            tl.store(partial_out, acc, mask=in_group)
            tl.store(lse_ptr + split_head, m_i + tl.log2(l_i), mask=group < GROUP)
            if COMBINE_AT_ONCE > 0:
                combine_if_last(
                    row, head, num_splits, row_splits_ptr, semaphores_ptr, partial_out_ptr, lse_ptr, out_ptr,
                    sinks_ptr, rows, GROUP, KV_HEADS, HEAD_DIM, DIM, COMBINE_AT_ONCE,
                )  # fmt: skip
    if PDL:  # not earlier: the next kernel's programs would take the place of programs of this one
        gdc_launch_dependents()


def schedule_decode(
    q: Tensor, layer: Tensor, metadata: PagedKVMetadata, rules: ScoreRules, max_seq_len: int
) -> SplitKVSchedule:
    """The schedule of a step for `paged_decode`, for all layers of this shape and window."""
    _, heads, head_dim = q.shape
    programs = num_multiprocessors(layer.device) * _PROGRAMS  # that run at a time
    return schedule_split_kv(metadata, heads, layer.shape[2], head_dim, rules, max_seq_len, programs)


def paged_decode(
    q: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rules: ScoreRules,
    max_seq_len: int,
    out: Tensor | None = None,
    schedule: SplitKVSchedule | None = None,
) -> Tensor:
    """q [rows, heads, head_dim], rows may be strided; layer [num_blocks, 2, kv_heads, block_size, head_dim] -> out
    [rows, heads * head_dim], contiguous, allocated if None; zeros in padding rows.

    max_seq_len: a bound of positions, which only sizes buffers. schedule: of `schedule_decode`, made here if None.
    Blocks and positions are not checked on device. Raises ValueError for other shapes and dtypes.
    """
    rows, heads, head_dim = q.shape
    kv_heads = layer.shape[2]
    check_attention_inputs(q, layer, metadata, rules.kv_scales)
    check_sinks(q, rules.sinks)
    if out is None:
        out = torch.empty((rows, heads * head_dim), dtype=q.dtype, device=q.device)
    if out.shape != (rows, heads * head_dim) or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out {list(out.shape)} {out.dtype} does not fit q {list(q.shape)}, or is not contiguous")
    if rows == 0:
        return out
    if schedule is None:
        schedule = schedule_decode(q, layer, metadata, rules, max_seq_len)
    if schedule.row_splits.shape != (2, rows) or schedule.partial_out.shape[1:] != (heads, head_dim):
        raise ValueError(f"the schedule is for {schedule.row_splits.shape[1]} rows, {list(schedule.partial_out.shape)}")
    pdl, is_fp8 = supports_pdl(q.device), fits_decode_fp8(q, layer)
    in_kernel = rows * kv_heads >= (_COMBINE_IN_FP8_KERNEL_PAIRS if is_fp8 else _COMBINE_IN_KERNEL_PAIRS)
    launch = launch_decode_fp8 if is_fp8 else _launch
    launch(q, layer, metadata, rules, out, schedule, in_kernel, pdl)
    if not in_kernel and len(schedule.lse) > rows:
        _combine(schedule, out, rules, pdl)
    return out


def _launch(
    q: Tensor, layer: Tensor, metadata: PagedKVMetadata, rules: ScoreRules, out: Tensor, schedule: SplitKVSchedule,
    in_kernel: bool, pdl: bool,
) -> None:  # fmt: skip
    """Launches the kernel for checked arguments of `paged_decode`. in_kernel: whether it combines splits."""
    (rows, heads, head_dim), kv_heads, scales = q.shape, layer.shape[2], rules.kv_scales
    dim, group = max(next_power_of_2(head_dim), 16), heads // kv_heads
    warps = _WARPS if group == next_power_of_2(group) else _FEW_WARPS
    _paged_decode_kernel[(schedule.programs * kv_heads,)](
        q, layer, metadata.tables, schedule.work, schedule.starts, schedule.partial_out, schedule.lse,
        schedule.row_splits, schedule.semaphores, out, q if scales is None else scales, q.stride(0),
        metadata.tables.stride(0), schedule.work.shape[1], rows, rules.power_scale,
        SCALED=scales is not None, CAP=rules.soft_cap or 0.0, GROUP=group, BLOCK_M=max(next_power_of_2(group), 16),
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIM=dim, BLOCK_SIZE=layer.shape[3], BLOCK_N=_tile(dim, q.element_size()),
        num_warps=warps, PDL=pdl, COMBINE_AT_ONCE=splits_at_once(group, dim) if in_kernel else 0,
        maxnreg=min(_REGISTERS // warps, 255), num_stages=_STAGES if q.element_size() <= 2 else 1,
        sinks_ptr=rules.sinks, **pdl_options(pdl),
    )  # fmt: skip


def _combine(schedule: SplitKVSchedule, out: Tensor, rules: ScoreRules, pdl: bool) -> None:
    """Adds the splits up to `out`, of the rows that have several."""
    rows, (heads, head_dim) = len(out), schedule.partial_out.shape[1:]
    splits, dims, warp_dims = _SPLITS_AT_ONCE, max(next_power_of_2(head_dim), 16), _WARP_DIMS
    if rows <= _FEW_ROWS:
        splits, dims, warp_dims = _FEW_ROWS_SPLITS, min(_FEW_ROWS_DIMS, dims), _FEW_ROWS_WARP_DIMS
    combine_splits_kernel[(rows, heads, ceil_div(head_dim, dims))](
        schedule.row_splits, schedule.partial_out, schedule.lse, out, rows, 1,
        HEADS=heads, HEAD_DIM=head_dim, DIM=dims, SPLITS=splits, sinks_ptr=rules.sinks, PDL=pdl,
        num_warps=max(dims // warp_dims, 1), **pdl_options(pdl),
    )  # fmt: skip


def _tile(dim: int, item_bytes: int) -> int:
    """Keys of a tile: K and V of two tiles take 64 KiB of shared memory at most, in 16 bits."""
    return max(min((16 << 10) // (dim * item_bytes), BLOCK_N), 16)
