"""A decode step of few rows in one kernel: head norm, rotation, KV write and attention; on a GPU.

A program has a part of the keys of one row and head; where keys are few, all of them. The last program of a head to be
done puts the parts together. With `overlap` (compute capability 9.0) it starts while the kernel before it ends, and
fetches its first keys and values before it waits: those are of earlier steps, and where they lie was known when the
step began. So between the kernel that gathers a step's rows and this one there has to be a kernel that neither starts
early nor lets others do so.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.attention.fused_decode_lanes import (
    arrive,
    capped,
    fold,
    keys_of_part,
    load_head,
    load_tile,
    stored,
    turned,
    write_new,
)
from blockyard.kernels.attention.paged_decode import paged_decode_reference
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.kv_types import FP8_MAX
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata, check_attention_inputs
from blockyard.kernels.kv_cache.rope_write_kv import check_qkv, rope_write_kv_reference
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

FUSED_DECODE_MAX_ROWS = 1  # more have not been measured
FUSED_DECODE_MAX_LEN = 8192  # keys: with 16,384 rotation, attention and combination in kernels of their own are quicker
_LOG2E = 1.4426950408889634
_PROGRAMS = 2 * 132
_COMBINED = 4096  # elements of parts that are put together at once


def fused_decode_reference(
    qkv: Tensor,
    layer: Tensor,
    seqs: PagedKVMetadata,
    rotation: Tensor | None,
    norm: RMSNorm | None,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
) -> Tensor:
    weight, eps = (None, 0.0) if norm is None else (norm.weight.to(qkv.dtype), norm.eps)
    rope_write_kv_reference(qkv, layer, seqs, rotation, weight, eps)
    return paged_decode_reference(qkv[:, : -2 * layer.shape[2]], layer, seqs, scale, window, soft_cap)


@dataclass(frozen=True, slots=True)
class FusedDecodeConfig:
    """How a program goes about its keys."""

    least: int  # keys of a part, if a row has more than that
    keys: int  # that a thread has at once
    warps: int


_CUTTING = FusedDecodeConfig(512, 16, 8)


class SplitSemaphores:
    """Counts the parts of each head that are done, 0 between kernels. For one stream; all layers can share it."""

    def __init__(self, most: int, device: torch.device) -> None:
        """For so many rows times heads."""
        self.counts = torch.zeros(most, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "out_ptr"])
def _fused_decode_kernel(
    qkv_ptr, layer_ptr, slots_ptr, positions_ptr, tables_ptr, rotation_ptr, gain_ptr, scales_ptr, partial_ptr,
    weight_ptr, counts_ptr, out_ptr, row_stride, table_stride, scale, eps,
    FP8_MAX: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr,
    LEAST: tl.constexpr, KEYS: tl.constexpr, WAYS: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # program (p, j, i) has part p of the keys of row i for head j, split in ways that meet at the end
    if PDL:
        gdc_launch_dependents()
    part, q_head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    head = q_head // GROUP
    slot = tl.load(slots_ptr + row)
    position = tl.where(slot >= 0, tl.load(positions_ptr + row), 0).to(tl.int32)
    begin, stop, parts = keys_of_part(position, part, tl.num_programs(0), WINDOW, LEAST)
    table = tables_ptr + slot * table_stride
    k, v = load_tile(begin, stop, table, layer_ptr, head, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, KEYS * WAYS)
    ways, dims = tl.arange(0, WAYS)[:, None], tl.arange(0, DIM)
    inside = tl.broadcast_to((dims < HEAD_DIM)[None, :], [WAYS, DIM])
    q_gain, k_gain = 1.0, 1.0
    if NORM:
        q_gain = load_head(gain_ptr, q_head, dims, inside, HEAD_DIM, WAYS, DIM)
        k_gain = load_head(gain_ptr, KV_HEADS * GROUP + head, dims, inside, HEAD_DIM, WAYS, DIM)
    if PDL:
        gdc_wait()
    if part < parts:
        cos, sin, k_scale, v_scale = 1.0, 0.0, 1.0, 1.0
        if FP8_MAX > 0:
            k_scale, v_scale = tl.load(scales_ptr), tl.load(scales_ptr + 1)
        source = qkv_ptr + row * row_stride
        if ROTATE:
            angle = load_head(rotation_ptr, row, dims, inside, HEAD_DIM, WAYS, DIM)
            cos, sin = tl.split(tl.reshape(angle, [WAYS, DIM // 2, 2]))
        # the new key is the last part's, in its first way
        new_k = load_head(source, KV_HEADS * GROUP + head, dims, inside, HEAD_DIM, WAYS, DIM).to(tl.float32)
        new_v = load_head(source, KV_HEADS * (GROUP + 1) + head, dims, inside, HEAD_DIM, WAYS, DIM).to(tl.float32)
        new_k = turned(new_k, k_gain, cos, sin, eps, HEAD_DIM, ROTATE, NORM)
        new_k = stored(new_k, k_scale, layer_ptr.dtype.element_ty, FP8_MAX)
        new_v = stored(new_v, v_scale, layer_ptr.dtype.element_ty, FP8_MAX)
        here = tl.where(part == parts - 1, ways, 1) == 0
        if (slot >= 0) & (q_head % GROUP == 0):
            write_new(table, layer_ptr, head, position, new_k, new_v, here & inside, KV_HEADS, HEAD_DIM, BLOCK_SIZE)
        q = load_head(source, q_head, dims, inside, HEAD_DIM, WAYS, DIM).to(tl.float32)
        q = turned(q, q_gain, cos, sin, eps, HEAD_DIM, ROTATE, NORM)
        seen = capped(tl.sum(q * new_k.to(tl.float32), 1), scale * k_scale, CAP)[:, None]
        top = tl.max(tl.where(here, seen, float("-inf")), 1)
        total = tl.where(here, new_v.to(tl.float32), 0.0)
        mass = tl.max(here.to(tl.float32), 1)
        known = begin + tl.arange(0, KEYS * WAYS) < stop
        total, mass, top = fold(q, k, v, known, scale * k_scale, total, mass, top, KEYS, WAYS, DIM, CAP)
        for start in range(begin + KEYS * WAYS, stop, KEYS * WAYS):
            k, v = load_tile(start, stop, table, layer_ptr, head, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, KEYS * WAYS)
            known = start + tl.arange(0, KEYS * WAYS) < stop
            total, mass, top = fold(q, k, v, known, scale * k_scale, total, mass, top, KEYS, WAYS, DIM, CAP)
        highest = tl.max(top, 0)
        fade = tl.exp2(top - highest)
        mass = tl.sum(mass * fade, 0)
        total = tl.sum(total * fade[:, None], 0) * (v_scale / mass)
        mine = row * (KV_HEADS * GROUP) + q_head
        if parts == 1:
            total = tl.where(slot >= 0, total, 0.0)
            tl.store(out_ptr + mine * HEAD_DIM + dims, total, mask=dims < HEAD_DIM)
        else:
            place = mine * tl.num_programs(0) + part
            tl.store(partial_ptr + place * HEAD_DIM + dims, total, mask=dims < HEAD_DIM)
            tl.store(weight_ptr + place, highest + tl.log2(mass))
            arrive(mine, parts, out_ptr, partial_ptr, weight_ptr, counts_ptr, HEAD_DIM, DIM, MOST, PARTS)


def supports_fused_decode(rows: int, longest: int) -> bool:
    """Whether a step of so many rows, none of more than `longest` keys, is quickest in this kernel."""
    return 0 < rows <= FUSED_DECODE_MAX_ROWS and longest <= FUSED_DECODE_MAX_LEN


def fused_decode(
    qkv: Tensor,
    layer: Tensor,
    seqs: PagedKVMetadata,
    rotation: Tensor | None,
    norm: RMSNorm | None,
    scale: float,
    window: int | None,
    longest: int,
    arrivals: SplitSemaphores,
    soft_cap: float | None = None,
    scales: Tensor | None = None,
    cutting: FusedDecodeConfig | None = None,
) -> Tensor:
    """As `rope_write_kv` and `paged_decode` after it, one row a sequence -> [rows, heads * head_dim].

    qkv stays as it is. Positions are at most `longest`, which only sizes buffers. `arrivals` has a count for each head
    of each row. Raises ValueError for other shapes.
    """
    rows, all_heads, head_dim = qkv.shape
    kv_heads, block_size = layer.shape[2], layer.shape[3]
    heads = all_heads - 2 * kv_heads
    angles = check_qkv(qkv, layer, seqs, rotation, None if norm is None else norm.weight, scales)
    check_attention_inputs(qkv[:, :heads], layer, seqs, scales)
    if len(arrivals.counts) < rows * heads:
        raise ValueError(f"{len(arrivals.counts)} counts for {rows} rows of {heads} heads")
    cutting = cutting or _CUTTING
    group, dim = heads // kv_heads, max(next_power_of_2(head_dim), 16)
    seen = longest if window is None else min(window, longest)
    most = max(min(_PROGRAMS // max(rows * heads, 1), ceil_div(seen, cutting.least)), 1)
    places = rows * heads * most
    partial = torch.empty((places, head_dim), dtype=torch.float32, device=qkv.device)
    weight = torch.empty(places, dtype=torch.float32, device=qkv.device)
    out = torch.empty((rows, heads * head_dim), dtype=qkv.dtype, device=qkv.device)
    if rows == 0:
        return out
    pdl = supports_pdl(qkv.device)
    _fused_decode_kernel[(most, heads, rows)](
        qkv,
        layer,
        seqs.slots,
        seqs.positions,
        seqs.tables,
        angles,
        qkv if norm is None else norm.weight,
        qkv if scales is None else scales,
        partial,
        weight,
        arrivals.counts,
        out,
        qkv.stride(0),
        seqs.tables.stride(0),
        scale if soft_cap is not None else scale * _LOG2E,
        0.0 if norm is None else norm.eps,
        FP8_MAX=FP8_MAX.get(layer.dtype, 0.0),
        CAP=soft_cap or 0.0,
        WINDOW=window or 0,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=block_size,
        ROTATE=rotation is not None,
        NORM=norm is not None,
        LEAST=cutting.least,
        KEYS=cutting.keys,
        WAYS=max(cutting.warps * 512 // (dim * qkv.element_size()), 1),
        MOST=next_power_of_2(most),
        PARTS=max(_COMBINED // dim, 1),
        PDL=pdl,
        num_warps=cutting.warps,
        num_stages=2,
        **pdl_options(pdl),
    )
    return out
