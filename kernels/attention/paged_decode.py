"""Attention of one new token a sequence over KV blocks in a pool, read through the block tables; on a GPU.

Split-KV (flash decoding): keys of a sequence are divided into splits (`schedule_split_kv`), which a fixed number of
programs share; a second kernel combines the splits of a sequence. Query heads that share a K/V head are the rows of
one tile.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.attention.combine import combine_splits_kernel, reduce_if_last, splits_at_once
from blockyard.kernels.attention.split_kv import TILE, SplitKVSchedule, schedule_split_kv
from blockyard.kernels.int_math import next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata, check_attention_inputs
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_LOG2E = 1.4426950408889634
_PROGRAMS = 4  # that share a multiprocessor
_STAGES = 2
_WARPS = 4
_FEW_WARPS = 2  # of heads that share a K/V head but are no power of 2: joining their pieces needs more registers
_REGISTERS = 512  # of a lane of each warp together, so that so many programs can
_PARTS = 32  # pieces that are put together at once
_JOINED = 48  # rows from which on the last program of each puts its pieces together: hardly one has many then


def paged_decode_reference(
    q: Tensor, layer: Tensor, seqs: PagedKVMetadata, scale: float, window: int | None, soft_cap: float | None = None
) -> Tensor:
    kv_heads, block_size, head_dim = layer.shape[2:]
    out = torch.zeros_like(q)
    for row, (slot, position) in enumerate(zip(seqs.slots.tolist(), seqs.positions.tolist(), strict=True)):
        if slot < 0:
            continue
        first = 0 if window is None else max(position + 1 - window, 0)
        blocks = seqs.tables[slot, : position // block_size + 1].long()
        keys, values = (
            layer[blocks].permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, first : position + 1]
        )
        grouped = q[row].view(kv_heads, -1, head_dim)
        scores = grouped @ keys.mT * scale
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        out[row] = (scores.softmax(-1) @ values).view(-1, head_dim)
    return out.flatten(1)


@triton.jit
def _attend(
    q, begin, stop, table_ptr, layer_ptr, head, scale,
    CAP: tl.constexpr, ROWS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Over the keys from begin to stop: sum of values, sum of shares, largest score; scores in powers of two."""
    dims = tl.arange(0, DIM)
    in_head = dims < HEAD_DIM
    top = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, DIM], tl.float32)
    for start in range(begin, stop, TILE):
        keys = start + tl.arange(0, TILE)
        known = keys < stop
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        lines = (blocks * (2 * KV_HEADS) + head) * BLOCK_SIZE + keys % BLOCK_SIZE
        k_ptr = layer_ptr + lines[None, :] * HEAD_DIM + dims[:, None]
        v_ptr = layer_ptr + (lines + KV_HEADS * BLOCK_SIZE)[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(k_ptr, mask=known[None, :] & in_head[:, None], other=0.0)
        v = tl.load(v_ptr, mask=known[:, None] & in_head[None, :], other=0.0)
        k, v = k.to(q.dtype), v.to(q.dtype)  # from 8 bits, if the pool has them
        scores = tl.dot(q, k, input_precision="ieee")
        if CAP > 0:
            scores = (2 * tl.sigmoid(scores * (2 * scale / CAP)) - 1) * (CAP * 1.4426950408889634)
        else:
            scores = scores * scale
        scores = tl.where(known[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))  # finite: a tile has at least one known key
        shares = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        mass = mass * fade + tl.sum(shares, 1)
        total = total * fade[:, None] + tl.dot(shares.to(v.dtype), v, input_precision="ieee")
        top = higher
    return total, mass, top


@triton.jit(do_not_specialize=["most", "rows"], do_not_specialize_on_alignment=["out_ptr"])
def _paged_decode_kernel(
    q_ptr, layer_ptr, tables_ptr, fields_ptr, count_ptr, partial_ptr, weight_ptr, of_row_ptr, arrived_ptr, out_ptr,
    scales_ptr, q_stride, table_stride, most, rows, scale,
    SCALED: tl.constexpr, CAP: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
    JOIN: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    # a piece and K/V head a turn; every other turn backwards, since pieces get shorter
    group, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    v_scale = 1.0
    if SCALED:
        scale *= tl.load(scales_ptr)
        v_scale = tl.load(scales_ptr + 1)
    programs, forward = tl.num_programs(0), tl.program_id(0)
    backward = programs - 1 - forward
    items = tl.load(count_ptr) * KV_HEADS
    whole = items // programs
    is_in_last = tl.where(whole % 2 == 0, forward, backward) < items % programs
    for turn in range(0, whole + is_in_last.to(tl.int32)):
        i = turn * programs + tl.where(turn % 2 == 0, forward, backward)
        head = i % KV_HEADS
        field_ptr = fields_ptr + i // KV_HEADS
        row = tl.load(field_ptr).to(tl.int64)
        slot = tl.load(field_ptr + most).to(tl.int64)
        begin = tl.load(field_ptr + 2 * most)
        stop = tl.load(field_ptr + 3 * most)
        parts = tl.load(field_ptr + 4 * most)
        heads = head * GROUP + group
        columns = heads[:, None] * HEAD_DIM + dims[None, :]
        in_group = (group < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + row * q_stride + columns, mask=in_group, other=0.0)
        total, mass, top = _attend(
            q, begin, stop, tables_ptr + slot * table_stride, layer_ptr, head, scale,
            CAP, ROWS, KV_HEADS, HEAD_DIM, DIM, BLOCK_SIZE, TILE,
        )  # fmt: skip
        total = total * (v_scale / tl.where(mass > 0, mass, 1.0))[:, None]  # rows that pad get zeros
        if parts == 1:
            tl.store(out_ptr + row * (KV_HEADS * GROUP * HEAD_DIM) + columns, total, mask=in_group)
        else:
            place = (i // KV_HEADS) * (KV_HEADS * GROUP) + heads
            partial = partial_ptr + place[:, None].to(tl.int64) * HEAD_DIM + dims[None, :]
            tl.store(partial, total, mask=in_group)
            tl.store(weight_ptr + place, top + tl.log2(mass), mask=group < GROUP)
            if JOIN > 0:
                reduce_if_last(row, head, parts, of_row_ptr, arrived_ptr, partial_ptr, weight_ptr, out_ptr, rows,
                             GROUP, KV_HEADS, HEAD_DIM, DIM, JOIN)  # fmt: skip
    if PDL:  # at once would let the next kernel's programs take the place of those that still have to begin
        gdc_launch_dependents()


def cut(q: Tensor, layer: Tensor, seqs: PagedKVMetadata, window: int | None, longest: int) -> SplitKVSchedule:
    """For `paged_decode` of any layer of this shape and window."""
    _, heads, head_dim = q.shape
    return schedule_split_kv(seqs, heads, layer.shape[2], head_dim, window, longest, _num_programs(layer))


def paged_decode(
    q: Tensor,
    layer: Tensor,
    seqs: PagedKVMetadata,
    scale: float,
    window: int | None,
    longest: int,
    out: Tensor | None = None,
    soft_cap: float | None = None,
    pieces: SplitKVSchedule | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """q [rows, heads, head_dim], rows may be strided; layer [num_blocks, 2, kv_heads, block_size, head_dim].

    `window`: how many of the last keys are attended to, None all. `longest`: no position is beyond it; it only sizes
    buffers. `soft_cap`: scores become soft_cap * tanh(score / soft_cap). `pieces`: what `cut` made of this step, made
    here if None. `scales`: of a pool of 8-bit floats, see `check_kv_dtype`. Returns `out` [rows, heads * head_dim],
    contiguous, made if None; zeros in rows of no slot. Blocks and positions must be right: not checked on device.
    Raises ValueError for other shapes and dtypes.
    """
    rows, heads, head_dim = q.shape
    kv_heads, block_size = layer.shape[2], layer.shape[3]
    check_attention_inputs(q, layer, seqs, scales)
    if out is None:
        out = torch.empty((rows, heads * head_dim), dtype=q.dtype, device=q.device)
    if out.shape != (rows, heads * head_dim) or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out {list(out.shape)} {out.dtype} does not fit q {list(q.shape)}, or is not contiguous")
    if rows == 0:
        return out
    if pieces is None:
        pieces = cut(q, layer, seqs, window, longest)
    if pieces.of_row.shape != (2, rows) or pieces.partial.shape[1:] != (heads, head_dim):
        raise ValueError(f"pieces were cut for {pieces.of_row.shape[1]} rows, {list(pieces.partial.shape)}")
    dim, group, pdl = max(next_power_of_2(head_dim), 16), heads // kv_heads, supports_pdl(q.device)
    warps = _WARPS if group == next_power_of_2(group) else _FEW_WARPS
    _paged_decode_kernel[(pieces.programs,)](
        q,
        layer,
        seqs.tables,
        pieces.fields,
        pieces.count,
        pieces.partial,
        pieces.weight,
        pieces.of_row,
        pieces.arrived,
        out,
        q if scales is None else scales,
        q.stride(0),
        seqs.tables.stride(0),
        pieces.fields.shape[1],
        rows,
        scale if soft_cap is not None else scale * _LOG2E,
        SCALED=scales is not None,
        CAP=soft_cap or 0.0,
        GROUP=group,
        ROWS=max(next_power_of_2(group), 16),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=block_size,
        TILE=_tile(dim, q.element_size()),
        num_warps=warps,
        PDL=pdl,
        JOIN=splits_at_once(group, dim) if rows >= _JOINED else 0,
        maxnreg=min(_REGISTERS // warps, 255),
        num_stages=_STAGES if q.element_size() <= 2 else 1,
        **pdl_options(pdl),
    )
    if rows < _JOINED and len(pieces.weight) > rows:
        combine_splits_kernel[(rows, heads)](
            pieces.of_row,
            pieces.partial,
            pieces.weight,
            out,
            rows,
            HEADS=heads,
            HEAD_DIM=head_dim,
            DIM=dim,
            PARTS=_PARTS,
            num_warps=4,
        )
    return out


def _tile(dim: int, item_bytes: int) -> int:
    """Keys of a tile: they and their values, twice, are 64 KiB of shared memory at most."""
    return max(min((16 << 10) // (dim * item_bytes), TILE), 16)


def _num_programs(layer: Tensor) -> int:
    """As many as run at once."""
    return _multiprocessors(layer.device) * _PROGRAMS


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
