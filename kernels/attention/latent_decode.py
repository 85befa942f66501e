"""Decode of latent attention over the paged KV cache: all heads read the same row of a token; on a GPU.

Split-KV as in `paged_decode`. A tile of rows is loaded once: its first numbers are K and V, the rest belongs to K
alone. Query heads are the rows of a product; more than `_HEADS` are several programs, which find the rows in the cache.
The query already has the up-projection of K in it (https://arxiv.org/abs/2405.04434).
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.attention.attention_tiles import LOG2E
from blockyard.kernels.attention.combine import combine_splits_kernel
from blockyard.kernels.attention.split_kv import SplitKVSchedule, schedule_split_kv
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

_HEADS = 16  # of a program
_KEYS = 32  # of a tile: 36 KiB in 16 bits
_PROGRAMS = 2  # a multiprocessor
_SPLITS_AT_ONCE = 8  # splits that the combine kernel loads at a time


def latent_decode_reference(
    q: Tensor, layer: Tensor, metadata: PagedKVMetadata, scale: float, latent_dim: int
) -> Tensor:
    rows, heads, _ = q.shape
    out = q.new_zeros((rows, heads, latent_dim))
    for row, (slot, position) in enumerate(zip(metadata.slots.tolist(), metadata.positions.tolist(), strict=True)):
        if slot >= 0:
            keys = torch.arange(position + 1, device=q.device)
            blocks = metadata.tables[slot, keys // layer.shape[3]].long()
            known = layer[blocks, 0, 0, keys % layer.shape[3]].to(q.dtype)
            out[row] = torch.softmax(q[row] @ known.T * scale, -1) @ known[:, :latent_dim]
    return out.flatten(1)


@triton.jit
def _attend_rows(
    q, q_rotated, begin, stop, table_ptr, layer_ptr, scale,
    BLOCK_M: tl.constexpr, LATENT: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, ROTATED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Attention over the rows from `begin` to `stop`: acc, l_i and m_i of FlashAttention, scores in powers of two."""
    dims, rotated = tl.arange(0, DIM), tl.arange(0, ROTATED_DIM)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for start in range(begin, stop, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        valid = keys < stop
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
        row_ptr = layer_ptr + (blocks * BLOCK_SIZE + keys % BLOCK_SIZE)[:, None] * (LATENT + ROTATED)
        latent = tl.load(row_ptr + dims[None, :], mask=valid[:, None] & (dims < LATENT)[None, :], other=0.0)
        in_rotated = valid[:, None] & (rotated < ROTATED)[None, :]
        turned = tl.load(row_ptr + LATENT + rotated[None, :], mask=in_rotated, other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rotated, tl.trans(turned), acc=scores, input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(scores, 1))  # finite: a tile has at least one key
        p = tl.exp2(scores - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None] + tl.dot(p.to(latent.dtype), latent, input_precision="ieee")
        m_i = m_new
    return acc, l_i, m_i


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=["out_ptr"])
def _latent_decode_kernel(
    q_ptr, layer_ptr, tables_ptr, work_ptr, starts_ptr, partial_out_ptr, lse_ptr, out_ptr, q_stride, table_stride,
    max_splits, scale,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr, LATENT: tl.constexpr, DIM: tl.constexpr,
    ROTATED: tl.constexpr, ROTATED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # program i: splits of program i // TILES of the schedule, for one tile of heads. Tiles of a split are neighbours,
    # so that its rows are still in the L2 cache
    dims, rotated = tl.arange(0, DIM), tl.arange(0, ROTATED_DIM)
    heads = (tl.program_id(0) % TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    starts_ptr += tl.program_id(0) // TILES
    for split in range(tl.load(starts_ptr), tl.load(starts_ptr + 1)):
        item_ptr = work_ptr + split
        row = tl.load(item_ptr).to(tl.int64)
        slot = tl.load(item_ptr + max_splits).to(tl.int64)
        begin = tl.load(item_ptr + 2 * max_splits)
        stop = tl.load(item_ptr + 3 * max_splits)
        num_splits = tl.load(item_ptr + 4 * max_splits)
        head_ptr = q_ptr + row * q_stride + heads[:, None] * (LATENT + ROTATED)
        in_latent = (heads < HEADS)[:, None] & (dims < LATENT)[None, :]
        in_rotated = (heads < HEADS)[:, None] & (rotated < ROTATED)[None, :]
        q = tl.load(head_ptr + dims[None, :], mask=in_latent, other=0.0)
        q_rotated = tl.load(head_ptr + LATENT + rotated[None, :], mask=in_rotated, other=0.0)
        acc, l_i, m_i = _attend_rows(
            q, q_rotated, begin, stop, tables_ptr + slot * table_stride, layer_ptr, scale, BLOCK_M, LATENT, DIM,
            ROTATED, ROTATED_DIM, BLOCK_SIZE, BLOCK_N,
        )  # fmt: skip
        acc = acc / tl.where(l_i > 0, l_i, 1.0)[:, None]  # zeros in padding rows
        columns = heads[:, None] * LATENT + dims[None, :]
        if num_splits == 1:
            tl.store(out_ptr + row * (HEADS * LATENT) + columns, acc, mask=in_latent)
        else:
            split_heads = split * HEADS + heads
            partial_out = partial_out_ptr + split_heads[:, None].to(tl.int64) * LATENT + dims[None, :]
            tl.store(partial_out, acc, mask=in_latent)
            tl.store(lse_ptr + split_heads, m_i + tl.log2(l_i), mask=heads < HEADS)


def schedule_latent_decode(q: Tensor, metadata: PagedKVMetadata, latent_dim: int, max_seq_len: int) -> SplitKVSchedule:
    """The schedule of a step for `latent_decode`, for all layers of this shape."""
    heads = q.shape[1]
    tiles = ceil_div(heads, _HEADS)
    return schedule_split_kv(metadata, heads, tiles, latent_dim, None, max_seq_len, _num_programs(q.device))


def latent_decode(
    q: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    scale: float,
    latent_dim: int,
    max_seq_len: int,
    out: Tensor | None = None,
    schedule: SplitKVSchedule | None = None,
) -> Tensor:
    """q [rows, heads, row_dim], rows may be strided; layer [num_blocks, 1, 1, block_size, row_dim] -> out [rows,
    heads * latent_dim], contiguous, allocated if None; zeros in padding rows.

    The first latent_dim numbers of a cached row are also its value. max_seq_len: a bound of positions, which only sizes
    buffers. schedule: of `schedule_latent_decode`, made here if None. Blocks and positions are not checked on device.
    Raises ValueError for other shapes and dtypes.
    """
    rows, heads, row_dim = q.shape
    _check(q, layer, metadata, latent_dim)
    if out is None:
        out = torch.empty((rows, heads * latent_dim), dtype=q.dtype, device=q.device)
    if out.shape != (rows, heads * latent_dim) or out.dtype != q.dtype or not out.is_contiguous():
        raise ValueError(f"out {list(out.shape)} {out.dtype} does not fit q {list(q.shape)}, or is not contiguous")
    if rows == 0:
        return out
    if schedule is None:
        schedule = schedule_latent_decode(q, metadata, latent_dim, max_seq_len)
    if schedule.row_splits.shape != (2, rows) or schedule.partial_out.shape[1:] != (heads, latent_dim):
        raise ValueError(f"the schedule is for {schedule.row_splits.shape[1]} rows, {list(schedule.partial_out.shape)}")
    dim, rotated = max(next_power_of_2(latent_dim), 16), row_dim - latent_dim
    tiles = ceil_div(heads, _HEADS)
    _latent_decode_kernel[(schedule.programs * tiles,)](
        q, layer, metadata.tables, schedule.work, schedule.starts, schedule.partial_out, schedule.lse, out, q.stride(0),
        metadata.tables.stride(0), schedule.work.shape[1], scale * LOG2E,
        HEADS=heads, BLOCK_M=_HEADS, TILES=tiles, LATENT=latent_dim, DIM=dim, ROTATED=rotated,
        ROTATED_DIM=max(next_power_of_2(rotated), 16), BLOCK_SIZE=layer.shape[3],
        BLOCK_N=_KEYS if q.element_size() <= 2 else _KEYS // 2, num_warps=4, num_stages=2,
    )  # fmt: skip
    if len(schedule.lse) > rows:
        combine_splits_kernel[(rows, heads)](
            schedule.row_splits, schedule.partial_out, schedule.lse, out, rows,
            HEADS=heads, HEAD_DIM=latent_dim, DIM=dim, SPLITS=_SPLITS_AT_ONCE, num_warps=4,
        )  # fmt: skip
    return out


def _check(q: Tensor, layer: Tensor, metadata: PagedKVMetadata, latent_dim: int) -> None:
    row_dim = q.shape[2]
    metadata.check(len(q))
    if layer.ndim != 5 or layer.shape[1:3] != (1, 1) or layer.shape[4] != row_dim or not layer.is_contiguous():
        raise ValueError(f"q {list(q.shape)} does not fit a layer {list(layer.shape)}, or that is not contiguous")
    if not 0 < latent_dim < row_dim:
        raise ValueError(f"{latent_dim} of {row_dim} numbers are no latent and a rotated part")
    if layer.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype}, the cache {layer.dtype}")
    if q.stride(2) != 1 or q.stride(1) != row_dim:
        raise ValueError(f"the heads of a row must be contiguous, got strides {q.stride()}")


@functools.cache
def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count) * _PROGRAMS
