"""`paged_prefill` for GPUs of NVIDIA's Hopper generation: warps that only load, and two groups of warps that compute.

After FlashAttention-3 (Shah et al. 2024): one warp has the tensor memory accelerator bring blocks of keys and values
into shared memory, where they make up the tiles that the tensor cores read; while a tile's scores are turned into
shares, the products of the tile before run. Blocks behind a sequence's end are not read, but what lies behind it in
its last block is, and multiplied by 0: it must be finite.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from blockyard.kernels.load_tiles_hopper import produce
from blockyard.kernels.sequences import Sequences

ROWS = 128  # queries of a program, half of them a group of warps
_KEYS = 128
_STAGES = 2
_LOG2E = 1.4426950408889634


@gluon.jit
def _release(barrier):
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _shares(scores, top, mass, tile, positions, scale,
            MASK: gl.constexpr, WINDOW: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    if MASK:
        keys = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))
        seen = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
        scores = gl.where(seen, scores, float("-inf"))
    higher = gl.maximum(top, gl.max(scores, 1) * scale)
    base = higher
    if MASK:
        base = gl.where(higher == float("-inf"), 0.0, higher)
    shares = gl.exp2(scores * scale - base[:, None])
    fade = gl.exp2(top - base)
    mass = mass * fade + gl.sum(shares, 1)
    return shares, fade, higher, mass


@gluon.jit
def _steps(
    begin, stop, top_tile, q, total, top, mass, shares, positions, scale, k_tiles, v_tiles, k_full, k_empty, v_full,
    v_empty, MASK: gl.constexpr, WINDOW: gl.constexpr, LINES: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr, TOTAL: gl.constexpr,
):  # fmt: skip
    """Scores of tiles begin to stop, and what the shares of the tile before each add to the total."""
    for i in range(begin, stop):
        stage = i % STAGES
        mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
        zeros = gl.zeros([LINES, KEYS], gl.float32, layout=SCORES)
        scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        before = (i - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        total = warpgroup_mma(shares, v_tiles.index(before), total, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        _release(k_empty.index(stage))
        next_shares, fade, top, mass = _shares(
            scores, top, mass, top_tile - i, positions, scale, MASK, WINDOW, KEYS, SCORES
        )
        total, shares = warpgroup_mma_wait(0, deps=[total, shares])
        _release(v_empty.index(before))
        fade = gl.convert_layout(fade, gl.SliceLayout(1, TOTAL))
        total = total * fade[:, None]
        shares = gl.convert_layout(next_shares.to(q.dtype), gl.DotOperandLayout(0, TOTAL, 2))
    return total, top, mass, shares


@gluon.jit
def _consume(
    part, q_ptr, out_ptr, weight_ptr, q_stride, start, first_row, first_line, num_lines, before, top_tile, num_tiles,
    num_masked, num_whole, head, scale, known, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty,
    WINDOW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    LINES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Four warps: attention of LINES queries, a token and head each, to all tiles."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    line = first_line + part * LINES
    lines = line + gl.arange(0, LINES, layout=gl.SliceLayout(1, LOAD))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOAD))
    row = (start + lines // GROUP).to(gl.int64)
    columns = (head * GROUP + lines % GROUP) * HEAD_DIM
    inside = (lines < num_lines)[:, None] & (dims < HEAD_DIM)[None, :]
    loaded = gl.load(q_ptr + (row * q_stride + columns)[:, None] + dims[None, :], mask=inside, other=0.0)
    q = q_tiles.index(part)
    q.store(loaded)
    fence_async_shared()
    gl.thread_barrier()
    positions = before + (line + gl.arange(0, LINES, layout=gl.SliceLayout(1, SCORES))) // GROUP
    top = gl.full([LINES], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    mass = gl.zeros([LINES], gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.zeros([LINES, HEAD_DIM], gl.float32, layout=TOTAL)

    mbarrier.wait(k_full.index(0), 0)
    zeros = gl.zeros([LINES, KEYS], gl.float32, layout=SCORES)
    scores = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), zeros, use_acc=False)
    _release(k_empty.index(0))
    first, _, top, mass = _shares(scores, top, mass, top_tile, positions, scale, True, WINDOW, KEYS, SCORES)
    shares = gl.convert_layout(first.to(q.dtype), gl.DotOperandLayout(0, TOTAL, 2))
    total, top, mass, shares = _steps(
        1, num_masked, top_tile, q, total, top, mass, shares, positions, scale, k_tiles, v_tiles, k_full, k_empty,
        v_full, v_empty, True, WINDOW, LINES, KEYS, STAGES, SCORES, TOTAL,
    )  # fmt: skip
    total, top, mass, shares = _steps(
        num_masked, num_whole, top_tile, q, total, top, mass, shares, positions, scale, k_tiles, v_tiles, k_full,
        k_empty, v_full, v_empty, False, WINDOW, LINES, KEYS, STAGES, SCORES, TOTAL,
    )  # fmt: skip
    if WINDOW > 0:
        total, top, mass, shares = _steps(
            num_whole, num_tiles, top_tile, q, total, top, mass, shares, positions, scale, k_tiles, v_tiles, k_full,
            k_empty, v_full, v_empty, True, WINDOW, LINES, KEYS, STAGES, SCORES, TOTAL,
        )  # fmt: skip
    last = num_tiles - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    total = warpgroup_mma(shares, v_tiles.index(last % STAGES), total)
    mass = gl.convert_layout(mass, gl.SliceLayout(1, TOTAL))
    total = gl.where(known, total / gl.where(mass > 0, mass, 1.0)[:, None], 0.0)
    result = gl.convert_layout(total.to(out_ptr.dtype.element_ty), LOAD)
    places = (row - first_row) * (KV_HEADS * GROUP) + head * GROUP + lines % GROUP
    if SHARED:
        places = places * gl.num_programs(2) + gl.program_id(2)
        weight = gl.convert_layout(top, gl.SliceLayout(1, TOTAL)) + gl.log2(gl.where(mass > 0, mass, 1.0))
        weight = gl.convert_layout(weight, gl.SliceLayout(1, LOAD))
        gl.store(weight_ptr + places, weight, mask=lines < num_lines)
    gl.store(out_ptr + places[:, None] * HEAD_DIM + dims[None, :], result, mask=inside)


@gluon.jit
def _leave_out(weight_ptr, row, first_line, num_lines, head,
               GROUP: gl.constexpr, KV_HEADS: gl.constexpr, ROWS: gl.constexpr):  # fmt: skip
    """There are fewer tiles than parts: this one has none."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lines = first_line + gl.arange(0, ROWS, layout=LAYOUT)
    places = (row + lines // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + head * GROUP + lines % GROUP
    nothing = gl.full([ROWS], float("-inf"), gl.float32, layout=LAYOUT)
    gl.store(weight_ptr + places * gl.num_programs(2) + gl.program_id(2), nothing, mask=lines < num_lines)


@gluon.jit(
    do_not_specialize=["num_seqs"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "starts_ptr"],
)
def _prefill_kernel(
    desc, q_ptr, slots_ptr, positions_ptr, tables_ptr, starts_ptr, out_ptr, weight_ptr, q_stride, table_stride,
    num_seqs, scale,
    WINDOW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr,
):  # fmt: skip
    # program (i, j, k) has part k of the keys of K/V head i of tile j from the end, as in `paged_prefill`
    head = gl.program_id(0)
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    base = gl.load(starts_ptr)
    seq = -1
    for i in range(0, num_seqs, 128):
        index = i + gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
        starts = gl.load(starts_ptr + index, mask=index < num_seqs, other=0)
        first = (starts - base) * GROUP // ROWS + index
        seq += gl.sum(((first <= tile) & (index < num_seqs)).to(gl.int32), 0)
    start = gl.load(starts_ptr + seq)
    num_lines = (gl.load(starts_ptr + seq + 1) - start) * GROUP
    first_line = (tile - (start - base) * GROUP // ROWS - seq) * ROWS
    if first_line >= num_lines:
        return
    slot = gl.load(slots_ptr + start)
    before = gl.load(positions_ptr + start).to(gl.int32)
    lowest = before + first_line // GROUP
    end = before + (gl.minimum(first_line + ROWS, num_lines) - 1) // GROUP + 1
    low_tile, first_block, top_tile = 0, 0, (end - 1) // KEYS
    if WINDOW > 0:
        low_tile = gl.maximum(lowest - WINDOW + 1, 0) // KEYS
        first_block = gl.maximum(lowest - WINDOW + 1, 0) // BLOCK_SIZE
    if SHARED:
        share = gl.cdiv(top_tile + 1 - low_tile, gl.num_programs(2))
        low_tile += gl.program_id(2) * share
        top_tile = gl.minimum(low_tile + share - 1, top_tile)
        if low_tile > top_tile:
            _leave_out(weight_ptr, start - base, first_line, num_lines, head, GROUP, KV_HEADS, ROWS)
            return
    num_tiles = top_tile + 1 - low_tile
    num_masked = gl.minimum(gl.maximum(top_tile + 1 - (lowest + 1) // KEYS, 1), num_tiles)
    num_whole = num_tiles
    if WINDOW > 0:
        whole_from = gl.cdiv(gl.maximum(end - WINDOW, 0), KEYS)
        num_whole = gl.minimum(gl.maximum(top_tile + 1 - whole_from, num_masked), num_tiles)

    BLOCKS: gl.constexpr = KEYS // BLOCK_SIZE
    HALVES: gl.constexpr = HEAD_DIM // 64
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    k_parts = gl.allocate_shared_memory(desc.dtype, [STAGES * HALVES * BLOCKS, BLOCK_SIZE, 64], LAYOUT)
    v_parts = gl.allocate_shared_memory(desc.dtype, [STAGES * HALVES * BLOCKS, BLOCK_SIZE, 64], LAYOUT)
    k_tiles = k_parts._reinterpret(desc.dtype, [STAGES, KEYS, HEAD_DIM], LAYOUT)
    v_tiles = v_parts._reinterpret(desc.dtype, [STAGES, KEYS, HEAD_DIM], LAYOUT)
    q_tiles = gl.allocate_shared_memory(desc.dtype, [2, ROWS // 2, HEAD_DIM], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    table = tables_ptr + gl.maximum(slot, 0) * table_stride  # of no slot: read, and not used
    gl.warp_specialize(
        [
            (_consume, (0, q_ptr, out_ptr, weight_ptr, q_stride, start, base, first_line, num_lines, before, top_tile,
                        num_tiles, num_masked, num_whole, head, scale, slot >= 0, q_tiles, k_tiles, v_tiles, k_full,
                        k_empty, v_full, v_empty, WINDOW, GROUP, KV_HEADS, HEAD_DIM, ROWS // 2, KEYS, STAGES, SHARED)),
            (_consume, (1, q_ptr, out_ptr, weight_ptr, q_stride, start, base, first_line, num_lines, before, top_tile,
                        num_tiles, num_masked, num_whole, head, scale, slot >= 0, q_tiles, k_tiles, v_tiles, k_full,
                        k_empty, v_full, v_empty, WINDOW, GROUP, KV_HEADS, HEAD_DIM, ROWS // 2, KEYS, STAGES, SHARED)),
            (produce, (desc, table, top_tile, num_tiles, first_block, (end - 1) // BLOCK_SIZE, head, k_parts, v_parts,
                        k_full, k_empty, v_full, v_empty, KV_HEADS, BLOCK_SIZE, BLOCKS, HALVES, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def fits(q: Tensor, layer: Tensor) -> bool:
    """Whether `prefill_hopper` takes them."""
    head_dim, block_size = layer.shape[4], layer.shape[3]
    return (
        q.device.type == "cuda"
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype == layer.dtype
        and q.dtype in (torch.float16, torch.bfloat16)
        and head_dim in (64, 128)
        and block_size in (16, 32, 64)
    )


def prefill_hopper(
    q: Tensor,
    layer: Tensor,
    seqs: Sequences,
    starts: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
    weight: Tensor,
    splits: int,
) -> None:
    """As `paged_prefill`, which has checked them. With several splits out is [rows, heads, splits, head_dim] float32,
    weight [rows, heads, splits] float32 and a part that has no keys writes its weight alone."""
    heads, head_dim = q.shape[1:]
    kv_heads, block_size = layer.shape[2], layer.shape[3]
    group, num_seqs = heads // kv_heads, len(starts) - 1
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    blocks = TensorDescriptor.from_tensor(layer.view(-1, head_dim), [block_size, 64], layout)
    _prefill_kernel[(kv_heads, len(out) * group // ROWS + num_seqs, splits)](
        blocks,
        q,
        seqs.slots,
        seqs.positions,
        seqs.tables,
        starts,
        out,
        weight,
        q.stride(0),
        seqs.tables.stride(0),
        num_seqs,
        scale * _LOG2E,
        WINDOW=window or 0,
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        ROWS=ROWS,
        KEYS=_KEYS,
        STAGES=_STAGES,
        SHARED=splits > 1,
        num_warps=4,
    )
