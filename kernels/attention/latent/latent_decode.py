"""Decode of latent attention over the paged KV cache: all heads read the same row of a token; on a GPU.

Split-KV as in `paged_decode`. A tile of rows is loaded once: its first numbers are K and V, the rest belongs to K
alone. Query heads are the rows of a product; more than fit in a tile are several programs, which find the rows in the
L2 cache. The query already has the up-projection of K in it (https://arxiv.org/abs/2405.04434).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.attention.combine import combine_splits_kernel
from blockyard.kernels.attention.score_rules import LOG2E, ScoreRules
from blockyard.kernels.attention.split_kv import SplitKVSchedule, schedule_split_kv
from blockyard.kernels.gpu_facts import num_multiprocessors
from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.kv_cache.kv_types import check_kv_dtype
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

# The combine kernel: splits that it loads at a time, and dims of a program. Few rows have many splits.
_FEW_ROWS = 8
_FEW_ROWS_SPLITS, _FEW_ROWS_DIMS = 128, 64
_SPLITS_AT_ONCE = 8
_COMBINE_PROGRAMS, _MOST_HEADS = 1024, 8  # programs that fill a GPU; heads of one where there would be more


@dataclass(frozen=True, slots=True)
class LatentDecodeConfig:
    """Tile sizes and launch options of the kernel."""

    heads: int  # of a program
    keys: int  # of a tile
    warps: int
    stages: int  # 5 keep two or three tiles: addresses of rows are loaded from block tables two stages before them
    programs: int  # of a multiprocessor at a time


def choose_config(heads: int, dtype: torch.dtype) -> LatentDecodeConfig:
    """The config that fits shared memory and registers where the latent has 512 numbers."""
    if dtype.itemsize > 2:
        return LatentDecodeConfig(16, 16, 4, 1, 1)
    if heads <= 16:
        return LatentDecodeConfig(16, 32, 4, 5, 2)  # 36 KiB a tile of keys
    if heads <= 32:
        return LatentDecodeConfig(32, 32, 8, 5, 1)
    return LatentDecodeConfig(64, 32, 8, 5, 1)


def latent_decode_reference(
    q_latent: Tensor, q_rotated: Tensor, layer: Tensor, metadata: PagedKVMetadata, rules: ScoreRules
) -> Tensor:
    rows, heads, latent_dim = q_latent.shape
    row_scale = 1.0 if rules.kv_scales is None else rules.kv_scales[0].to(q_latent.dtype)
    q, out = torch.cat((q_latent, q_rotated), 2), q_latent.new_zeros((rows, heads, latent_dim))
    for row, (slot, position) in enumerate(zip(metadata.slots.tolist(), metadata.positions.tolist(), strict=True)):
        if slot >= 0:
            keys = torch.arange(position + 1, device=q.device)
            blocks = metadata.tables[slot, keys // layer.shape[3]].long()
            known = layer[blocks, 0, 0, keys % layer.shape[3]].to(q.dtype) * row_scale
            out[row] = torch.softmax(q[row] @ known.T * rules.scale, -1) @ known[:, :latent_dim]
    return out


@triton.jit
def attend_rows(
    q, q_rotated, begin, stop, table_ptr, layer_ptr, scale,
    BLOCK_M: tl.constexpr, LATENT: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, ROTATED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, CONVERT_ONCE: tl.constexpr = False,
):  # fmt: skip
    """Attention over the rows from `begin` to `stop`: acc, l_i and m_i of FlashAttention, scores in powers of two.

    Rows in 8 bits are not multiplied by their scale.
    """
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
        latent, turned = latent.to(q.dtype), turned.to(q.dtype)
        if CONVERT_ONCE:
            # 8-bit rows. Without this the compiler moves the conversion behind the layouts of both products, to which
            # rows in 8 bits come byte by byte, and then does not load the next tile early
            latent = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [latent], q.dtype, is_pure=False, pack=2)
            turned = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [turned], q.dtype, is_pure=False, pack=2)
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


@triton.jit
def load_query(
    q_ptr, q_row, q_head, rotated_ptr, rotated_row, rotated_head, row, heads,
    HEADS: tl.constexpr, LATENT: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, ROTATED_DIM: tl.constexpr,
):  # fmt: skip
    """Returns both parts of the query of some heads of a row, by the strides of rows and heads."""
    dims, rotated = tl.arange(0, DIM), tl.arange(0, ROTATED_DIM)
    exists = (heads < HEADS)[:, None]
    q = tl.load(
        q_ptr + row * q_row + heads[:, None] * q_head + dims[None, :], mask=exists & (dims < LATENT)[None, :], other=0.0
    )
    places = rotated_ptr + row * rotated_row + heads[:, None] * rotated_head + rotated[None, :]
    return q, tl.load(places, mask=exists & (rotated < ROTATED)[None, :], other=0.0)


@triton.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=["out_ptr"])
def _latent_decode_kernel(
    q_ptr, rotated_ptr, layer_ptr, tables_ptr, work_ptr, starts_ptr, partial_out_ptr, lse_ptr, out_ptr, scales_ptr,
    q_row, q_head, rotated_row, rotated_head, table_stride, max_splits, scale,
    SCALED: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr, TILES: tl.constexpr, LATENT: tl.constexpr,
    DIM: tl.constexpr, ROTATED: tl.constexpr, ROTATED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, CONVERT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
    # program i: splits of program i // TILES of the schedule, for one tile of heads. Tiles of a split are neighbours,
    # so that its rows are still in the L2 cache
    dims = tl.arange(0, DIM)
    row_scale = 1.0
    if SCALED:
        row_scale = tl.load(scales_ptr)
        scale *= row_scale
    heads = (tl.program_id(0) % TILES) * BLOCK_M + tl.arange(0, BLOCK_M)
    starts_ptr += tl.program_id(0) // TILES
    for split in range(tl.load(starts_ptr), tl.load(starts_ptr + 1)):
        item_ptr = work_ptr + split
        row = tl.load(item_ptr).to(tl.int64)
        slot = tl.load(item_ptr + max_splits).to(tl.int64)
        begin = tl.load(item_ptr + 2 * max_splits)
        stop = tl.load(item_ptr + 3 * max_splits)
        num_splits = tl.load(item_ptr + 4 * max_splits)
        in_latent = (heads < HEADS)[:, None] & (dims < LATENT)[None, :]
        q, q_rotated = load_query(
            q_ptr, q_row, q_head, rotated_ptr, rotated_row, rotated_head, row, heads, HEADS, LATENT, DIM, ROTATED,
            ROTATED_DIM,
        )  # fmt: skip
        acc, l_i, m_i = attend_rows(
            q, q_rotated, begin, stop, tables_ptr + slot * table_stride, layer_ptr, scale, BLOCK_M, LATENT, DIM,
            ROTATED, ROTATED_DIM, BLOCK_SIZE, BLOCK_N, CONVERT_ONCE,
        )  # fmt: skip
        acc = acc * (row_scale / tl.where(l_i > 0, l_i, 1.0))[:, None]  # zeros in padding rows
        columns = heads[:, None] * LATENT + dims[None, :]
        if num_splits == 1:
            tl.store(out_ptr + row * (HEADS * LATENT) + columns, acc, mask=in_latent)
        else:
            split_heads = split * HEADS + heads
            partial_out = partial_out_ptr + split_heads[:, None].to(tl.int64) * LATENT + dims[None, :]
            tl.store(partial_out, acc, mask=in_latent)
            tl.store(lse_ptr + split_heads, m_i + tl.log2(l_i), mask=heads < HEADS)
    if PDL:  # not earlier: the next kernel's programs would take the place of programs of this one
        gdc_launch_dependents()


def schedule_latent_decode(
    q_latent: Tensor, metadata: PagedKVMetadata, rules: ScoreRules, max_seq_len: int
) -> SplitKVSchedule:
    """The schedule of a step for `latent_decode`, for all layers of this shape and dtype."""
    _, heads, latent_dim = q_latent.shape
    config = choose_config(heads, q_latent.dtype)
    programs = num_multiprocessors(q_latent.device) * config.programs
    return schedule_split_kv(metadata, heads, ceil_div(heads, config.heads), latent_dim, rules, max_seq_len, programs)


def latent_decode(
    q_latent: Tensor,
    q_rotated: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rules: ScoreRules,
    max_seq_len: int,
    out: Tensor | None = None,
    schedule: SplitKVSchedule | None = None,
) -> Tensor:
    """q_latent [rows, heads, latent], q_rotated [rows, heads, rotated], rows and heads may be strided; layer
    [num_blocks, 1, 1, block_size, latent + rotated] -> out [rows, heads, latent], contiguous, allocated if None; zeros
    in padding rows.

    The latent of a cached row is also its value. Of `rules` only the scale and `kv_scales` are supported. max_seq_len:
    a bound of positions, which only sizes buffers. schedule: of `schedule_latent_decode`, made here if None. Blocks and
    positions are not checked on device. Raises ValueError for other shapes and dtypes.
    """
    (rows, heads, latent_dim), rotated, scales = q_latent.shape, q_rotated.shape[2], rules.kv_scales
    check_latent_inputs(q_latent, q_rotated, layer, metadata, scales)
    out = check_latent_output(q_latent, out)
    if rows == 0:
        return out
    if schedule is None:
        schedule = schedule_latent_decode(q_latent, metadata, rules, max_seq_len)
    check_latent_schedule(schedule, out)
    config, pdl = choose_config(heads, q_latent.dtype), supports_pdl(q_latent.device)
    tiles = ceil_div(heads, config.heads)
    _latent_decode_kernel[(schedule.programs * tiles,)](
        q_latent, q_rotated, layer, metadata.tables, schedule.work, schedule.starts, schedule.partial_out, schedule.lse,
        out, q_latent if scales is None else scales, *q_latent.stride()[:2], *q_rotated.stride()[:2],
        metadata.tables.stride(0), schedule.work.shape[1], rules.scale * LOG2E,
        SCALED=scales is not None, HEADS=heads, BLOCK_M=config.heads, TILES=tiles, LATENT=latent_dim,
        DIM=max(next_power_of_2(latent_dim), 16), ROTATED=rotated, ROTATED_DIM=max(next_power_of_2(rotated), 16),
        BLOCK_SIZE=layer.shape[3], BLOCK_N=config.keys, CONVERT_ONCE=converts_once(q_latent, scales),
        PDL=pdl, num_warps=config.warps, num_stages=config.stages,
        **pdl_options(pdl),
    )  # fmt: skip
    combine_latent(schedule, out, pdl)
    return out


def combine_latent(schedule: SplitKVSchedule, out: Tensor, pdl: bool) -> None:
    """Adds the splits up to out [rows, heads, latent], of the rows that have several."""
    rows, heads, latent_dim = out.shape
    if len(schedule.lse) <= rows:
        return
    dim = max(next_power_of_2(latent_dim), 16)
    splits, dims = (_FEW_ROWS_SPLITS, min(_FEW_ROWS_DIMS, dim)) if rows <= _FEW_ROWS else (_SPLITS_AT_ONCE, dim)
    of_program = min(max(rows * heads // _COMBINE_PROGRAMS, 1), _MOST_HEADS)
    combine_splits_kernel[(rows, ceil_div(heads, of_program), ceil_div(latent_dim, dims))](
        schedule.row_splits, schedule.partial_out, schedule.lse, out, rows, of_program,
        HEADS=heads, HEAD_DIM=latent_dim, DIM=dims, SPLITS=splits, PDL=pdl, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip


def converts_once(q_latent: Tensor, scales: Tensor | None) -> bool:
    """Whether rows in 8 bits pass the assembly that keeps their conversion in front: it takes pairs of 16 bits."""
    return scales is not None and q_latent.is_cuda and q_latent.dtype.itemsize == 2


def check_latent_inputs(
    q_latent: Tensor, q_rotated: Tensor, layer: Tensor, metadata: PagedKVMetadata, scales: Tensor | None
) -> None:
    """Checks both parts of a query against a layer of the cache and its scales. Raises ValueError."""
    rows, heads, latent_dim = q_latent.shape
    row_dim = latent_dim + q_rotated.shape[2]
    metadata.check(rows)
    if q_rotated.shape[:2] != (rows, heads) or q_rotated.dtype != q_latent.dtype:
        raise ValueError(f"q_latent {list(q_latent.shape)}, q_rotated {list(q_rotated.shape)} {q_rotated.dtype}")
    if layer.ndim != 5 or layer.shape[1:3] != (1, 1) or layer.shape[4] != row_dim or not layer.is_contiguous():
        raise ValueError(f"{row_dim} numbers do not fit a layer {list(layer.shape)}, or that is not contiguous")
    check_kv_dtype(q_latent, layer, scales)
    if q_latent.stride(2) != 1 or q_rotated.stride(2) != 1:
        raise ValueError(f"a head must be contiguous, got strides {q_latent.stride()}, {q_rotated.stride()}")


def check_latent_output(q_latent: Tensor, out: Tensor | None) -> Tensor:
    """Returns out, or a new tensor if None. Raises ValueError if it does not fit."""
    if out is None:
        return q_latent.new_empty(q_latent.shape)
    if out.shape != q_latent.shape or out.dtype != q_latent.dtype or not out.is_contiguous():
        raise ValueError(f"out {list(out.shape)} {out.dtype} does not fit {list(q_latent.shape)}, or is not contiguous")
    return out


def check_latent_schedule(schedule: SplitKVSchedule, out: Tensor) -> None:
    """Raises ValueError if the schedule is for other rows or heads than out [rows, heads, latent] has."""
    if schedule.row_splits.shape != (2, len(out)) or schedule.partial_out.shape[1:] != out.shape[1:]:
        raise ValueError(f"the schedule is for {schedule.row_splits.shape[1]} rows, {list(schedule.partial_out.shape)}")
