"""Decode attention of few rows in one kernel: head norm, rotary embedding, KV write and attention; on a GPU.

A program has a split of the keys of one row and query head; where keys are few, all of them. The last program of a
head to finish combines the splits.

With PDL (see `programmatic_launch`) the kernel loads slots, positions, block tables and its first keys and values
before it waits for the kernel before it. Earlier steps wrote those keys and values, but the rest is written in this
step, by `gather_inputs` last. So the model must launch a kernel without PDL between `gather_inputs` and this kernel.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.attention.attention_tiles import apply_soft_cap, check_sinks
from blockyard.kernels.attention.fused_decode_lanes import (
    load_head,
    load_kv_tile,
    norm_and_rotate,
    online_softmax_update,
    quantize,
    split_key_range,
    store_split,
    write_kv,
)
from blockyard.kernels.attention.paged_decode import paged_decode_reference
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.kv_types import FP8_MAX
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata, check_attention_inputs
from blockyard.kernels.kv_cache.rope_write_kv import qkv_arguments, rope_write_kv_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_MULTIPROCESSORS = 132
_COMBINED_ELEMENTS = 4096  # elements of splits that are combined at a time


def fused_decode_reference(
    qkv: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rotation: Tensor | None,
    norm: RMSNorm | None,
    rules: ScoreRules,
) -> Tensor:
    weight, eps = (None, 0.0) if norm is None else (norm.weight.to(qkv.dtype), norm.eps)
    rope_write_kv_reference(qkv, layer, metadata, rotation, weight, eps, rules.kv_scales)
    return paged_decode_reference(qkv[:, : -2 * layer.shape[2]], layer, metadata, rules)


@dataclass(frozen=True, slots=True)
class FusedDecodeConfig:
    """How a program divides its keys."""

    min_keys: int  # keys of a split, at least; combining splits takes 3 us
    keys: int  # of a thread at a time, in the dtype of q
    warps: int
    programs: int  # at most, for each multiprocessor, if keys are split
    ahead: bool = False  # the next keys are loaded before these are used


def choose_config(head_dim: int) -> FusedDecodeConfig:
    """The config of a head size, with which a program loads all keys of a short split before it waits.

    Registers hold 256 keys of up to 128 numbers: rows of so many are not split.
    """
    if head_dim > 256:  # a lane is a warp
        return FusedDecodeConfig(32, 8, 4, 2)
    if head_dim > 128:
        return FusedDecodeConfig(64, 8, 4, 2, ahead=True)
    return FusedDecodeConfig(256, 8, 8, 2) if head_dim <= 64 else FusedDecodeConfig(256, 16, 8, 1)


class SplitSemaphores:
    """Counters of finished splits of each head, 0 between kernels. One serves all layers of a stream."""

    def __init__(self, max_splits: int, device: torch.device) -> None:
        """max_splits: rows times heads, as every head of a row has one counter."""
        self.counts = torch.zeros(max_splits, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "out_ptr"])
def _fused_decode_kernel(
    qkv_ptr, layer_ptr, slots_ptr, positions_ptr, tables_ptr, rotation_ptr, norm_weight_ptr, scales_ptr,
    partial_out_ptr, lse_ptr, semaphores_ptr, out_ptr, row_stride, table_stride, scale, eps,
    FP8_MAX: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROTATE: tl.constexpr,
    NORM: tl.constexpr, NORM_VALUES: tl.constexpr, MIN_KEYS: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr,
    AHEAD: tl.constexpr, SPLITS_AT_ONCE: tl.constexpr, PDL: tl.constexpr, sinks_ptr=None,
):  # fmt: skip
    # program (j, s, i): split s of the keys of row i for query head j; lanes are combined at the end. The first splits
    # of all heads come first: where keys are few, the programs behind them have none
    if PDL:
        gdc_launch_dependents()
    q_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = q_head // GROUP
    slot = tl.load(slots_ptr + row)
    position = tl.where(slot >= 0, tl.load(positions_ptr + row), 0).to(tl.int32)
    begin, stop, num_splits = split_key_range(position, split, tl.num_programs(1), WINDOW, CHUNKED, MIN_KEYS)
    if split >= num_splits:  # without a wait: the first splits wait for the kernel before, so this kernel ends after it
        return
    table = tables_ptr + slot * table_stride
    k, v = load_kv_tile(begin, stop, table, layer_ptr, head, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, KEYS * LANES)
    if AHEAD:
        k_next, v_next = load_kv_tile(
            begin + KEYS * LANES, stop, table, layer_ptr, head, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, KEYS * LANES
        )  # fmt: skip
    lanes, dims = tl.arange(0, LANES)[:, None], tl.arange(0, DIM)
    inside = tl.broadcast_to((dims < HEAD_DIM)[None, :], [LANES, DIM])
    q_norm_weight, k_norm_weight = 1.0, 1.0
    if NORM:
        q_norm_weight = load_head(norm_weight_ptr, q_head, dims, inside, HEAD_DIM, LANES, DIM)
        k_norm_weight = load_head(norm_weight_ptr, KV_HEADS * GROUP + head, dims, inside, HEAD_DIM, LANES, DIM)
    writes = (slot >= 0) & (q_head % GROUP == 0) & (split == num_splits - 1)
    new_block = tl.load(table + position // BLOCK_SIZE, mask=writes, other=0).to(tl.int64)
    if PDL:
        gdc_wait()
    cos, sin, k_scale, v_scale = 1.0, 0.0, 1.0, 1.0
    if FP8_MAX > 0:
        k_scale, v_scale = tl.load(scales_ptr), tl.load(scales_ptr + 1)
    source = qkv_ptr + row * row_stride
    if ROTATE:
        angle = load_head(rotation_ptr, row, dims, inside, HEAD_DIM, LANES, DIM)
        cos, sin = tl.split(tl.reshape(angle, [LANES, DIM // 2, 2]))
    # the new key belongs to the last split, to its first lane
    new_k = load_head(source, KV_HEADS * GROUP + head, dims, inside, HEAD_DIM, LANES, DIM).to(tl.float32)
    new_v = load_head(source, KV_HEADS * (GROUP + 1) + head, dims, inside, HEAD_DIM, LANES, DIM).to(tl.float32)
    q = load_head(source, q_head, dims, inside, HEAD_DIM, LANES, DIM).to(tl.float32)
    new_k = norm_and_rotate(new_k, k_norm_weight, cos, sin, eps, HEAD_DIM, ROTATE, NORM)
    if NORM_VALUES:
        v_norm_weight = load_head(norm_weight_ptr, KV_HEADS * (GROUP + 1) + head, dims, inside, HEAD_DIM, LANES, DIM)
        new_v = norm_and_rotate(new_v, v_norm_weight, cos, sin, eps, HEAD_DIM, False, True)
    new_k = quantize(new_k, k_scale, layer_ptr.dtype.element_ty, FP8_MAX)
    new_v = quantize(new_v, v_scale, layer_ptr.dtype.element_ty, FP8_MAX)
    here = tl.where(split == num_splits - 1, lanes, 1) == 0
    if writes:
        write_kv(new_block, layer_ptr, head, position, new_k, new_v, here & inside, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    q = norm_and_rotate(q, q_norm_weight, cos, sin, eps, HEAD_DIM, ROTATE, NORM)
    new_score = apply_soft_cap(tl.sum(q * new_k.to(tl.float32), 1), scale * k_scale, CAP)[:, None]
    m_i = tl.max(tl.where(here, new_score, float("-inf")), 1)
    acc = tl.where(here, new_v.to(tl.float32), 0.0)
    l_i = tl.max(here.to(tl.float32), 1)
    acc, l_i, m_i = online_softmax_update(
        q, k, v, begin, stop, scale * k_scale, acc, l_i, m_i, KEYS, LANES, DIM, CAP
    )  # fmt: skip
    for start in range(begin + KEYS * LANES, stop, KEYS * LANES):
        if AHEAD:
            k, v = k_next, v_next
            k_next, v_next = load_kv_tile(
                start + KEYS * LANES, stop, table, layer_ptr, head, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, KEYS * LANES
            )  # fmt: skip
        else:
            k, v = load_kv_tile(
                start, stop, table, layer_ptr, head, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, KEYS * LANES
            )  # fmt: skip
        acc, l_i, m_i = online_softmax_update(
            q, k, v, start, stop, scale * k_scale, acc, l_i, m_i, KEYS, LANES, DIM, CAP
        )  # fmt: skip
    store_split(
        acc, l_i, m_i, v_scale, slot, row * (KV_HEADS * GROUP) + q_head, split, num_splits, out_ptr, partial_out_ptr,
        lse_ptr, semaphores_ptr, sinks_ptr, KV_HEADS * GROUP, HEAD_DIM, DIM, SPLITS_AT_ONCE,
    )  # fmt: skip


def fused_decode(
    qkv: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rotation: Tensor | None,
    norm: RMSNorm | None,
    rules: ScoreRules,
    max_seq_len: int,
    semaphores: SplitSemaphores,
    config: FusedDecodeConfig | None = None,
) -> Tensor:
    """Computes `rope_write_kv` and then `paged_decode`, one row a sequence -> [rows, heads * head_dim].

    qkv is not changed. Positions are at most `max_seq_len`, which only sizes buffers. `semaphores` has a counter for
    each head of each row. Raises ValueError for other shapes.
    """
    rows, all_heads, head_dim = qkv.shape
    kv_heads, block_size = layer.shape[2], layer.shape[3]
    heads, scales = all_heads - 2 * kv_heads, rules.kv_scales
    arguments = qkv_arguments(qkv, layer, metadata, rotation, None if norm is None else norm.weight, scales)
    check_attention_inputs(qkv[:, :heads], layer, metadata, scales)
    check_sinks(qkv[:, :heads], rules.sinks)
    if len(semaphores.counts) < rows * heads:
        raise ValueError(f"{len(semaphores.counts)} counts for {rows} rows of {heads} heads")
    config = config or choose_config(head_dim)
    most_programs = config.programs * _MULTIPROCESSORS
    group, dim = heads // kv_heads, max(next_power_of_2(head_dim), 16)
    # a thread loads 16 bytes of a key: the fewer threads a lane has, the more keys the lanes have at a time
    lanes = max(config.warps * 512 // (dim * layer.element_size()), config.warps if head_dim > 256 else 1)
    keys = max(config.keys * layer.element_size() // qkv.element_size(), 1)
    most_splits = ceil_div(rules.num_keys(max_seq_len), config.min_keys)
    max_splits = max(min(most_programs // max(rows * heads, 1), most_splits), 1)
    num_partials = rows * heads * max_splits
    partial_out = torch.empty((num_partials, head_dim), dtype=torch.float32, device=qkv.device)
    lse = torch.empty(num_partials, dtype=torch.float32, device=qkv.device)
    out = torch.empty((rows, heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    if rows == 0:
        return out
    pdl = supports_pdl(qkv.device)
    _fused_decode_kernel[(heads, max_splits, rows)](
        *arguments, partial_out, lse, semaphores.counts, out, qkv.stride(0), metadata.tables.stride(0),
        rules.power_scale, 0.0 if norm is None else norm.eps,
        FP8_MAX=FP8_MAX.get(layer.dtype, 0.0), CAP=rules.soft_cap or 0.0, WINDOW=rules.window or 0,
        CHUNKED=rules.chunked, GROUP=group,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, DIM=dim, BLOCK_SIZE=block_size, ROTATE=rotation is not None,
        NORM=norm is not None, NORM_VALUES=norm is not None and len(norm.weight) == all_heads,
        MIN_KEYS=config.min_keys, KEYS=keys, LANES=lanes,
        SPLITS_AT_ONCE=min(max(_COMBINED_ELEMENTS // dim, 1), next_power_of_2(max_splits)),
        AHEAD=config.ahead, PDL=pdl,
        sinks_ptr=rules.sinks, num_warps=config.warps, num_stages=2, **pdl_options(pdl),
    )  # fmt: skip
    return out
