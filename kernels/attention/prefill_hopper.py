"""`paged_prefill` for GPUs of NVIDIA's Hopper generation: warps that only load, and two groups of warps that compute.

After FlashAttention-3 (Shah et al. 2024): one warp has the tensor memory accelerator bring blocks of keys and values
into shared memory, where they make up the tiles that the tensor cores read; while a tile's scores are turned into
shares, the products of the tile before run. Blocks behind a sequence's end are not read, but what lies behind it in
its last block is, and multiplied by 0: it must be finite.
"""

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from blockyard.kernels.attention.hopper_consumer import attend_item
from blockyard.kernels.attention.hopper_producer import (
    count_tiles,
    find_item,
    find_range,
    find_sequence,
    produce,
    warp_uniform,
)
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

ROWS = 128  # queries of a program, half of them a group of warps
_KEYS = 128
_STAGES = 2
_SEQS = 16  # looked at together
_ROUNDS = 3  # of programs: with fewer each has one item, for those that pad are over soon
_LOG2E = 1.4426950408889634
_BLOCK_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)  # takes 5 us to make


@gluon.jit
def _leave_out(weight_ptr, row, line, num_lines, head, part, parts,
               GROUP: gl.constexpr, KV_HEADS: gl.constexpr, LINES: gl.constexpr):  # fmt: skip
    """There are fewer tiles of keys than parts: this one has none."""
    lines = line + gl.arange(0, LINES, layout=gl.BlockedLayout([1], [32], [4], [0]))
    places = (row + lines // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + head * GROUP + lines % GROUP
    gl.store(weight_ptr + places * parts + part, float("-inf"), mask=lines < num_lines)


@gluon.jit
def _store(
    q, total, weight, out_ptr, weight_ptr, row, line, num_lines, head, part, parts,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, LINES: gl.constexpr, SHARED: gl.constexpr,
    LOAD: gl.constexpr, TOTAL: gl.constexpr,
):  # fmt: skip
    OWN: gl.constexpr = TOTAL if out_ptr.dtype.element_ty == gl.float32 else LOAD
    lines = line + gl.arange(0, LINES, layout=gl.SliceLayout(1, OWN))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OWN))
    inside = (lines < num_lines)[:, None] & (dims < HEAD_DIM)[None, :]
    places = (row + lines // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + head * GROUP + lines % GROUP
    if SHARED:
        places = places * parts + part
        gl.store(weight_ptr + places, gl.convert_layout(weight, gl.SliceLayout(1, OWN)), mask=lines < num_lines)
    pointers = out_ptr + places[:, None] * HEAD_DIM + dims[None, :]
    if out_ptr.dtype.element_ty == gl.float32:
        gl.store(pointers, total, mask=inside)
    else:
        q.store(total.to(out_ptr.dtype.element_ty))  # whole rows of it lie in several threads
        gl.thread_barrier()
        gl.store(pointers, q.load(LOAD), mask=inside)


@gluon.jit
def _consume(
    half, q_ptr, slots_ptr, positions_ptr, starts_ptr, out_ptr, weight_ptr, q_stride, num_seqs, all_tiles, parts, scale,
    q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
    FIRST: gl.constexpr, WINDOW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, SHARED: gl.constexpr, SEQS: gl.constexpr,
):  # fmt: skip
    """Four warps: attention of half the rows of each item to all its keys."""
    LINES: gl.constexpr = ROWS // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    base = gl.load(starts_ptr)
    q = q_tiles.index(half)
    my_turn, next_turn = turns.index(half), turns.index(1 - half)
    all_tiles = warp_uniform(all_tiles)
    num_items = all_tiles * KV_HEADS * parts
    first_tile, next_tile, start, num_lines, slot, before = 0, 0, 0, 0, 0, 0
    count = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = find_item(turn, num_items)
        head, tile = item % KV_HEADS, all_tiles - 1 - item // KV_HEADS % all_tiles
        if (item >= 0) & ((tile < first_tile) | (tile >= next_tile)):
            first_tile, next_tile, start, num_lines, slot, before = find_sequence(
                tile, starts_ptr, slots_ptr, positions_ptr, num_seqs, GROUP, ROWS, 4, SEQS
            )
        first_line = (tile - first_tile) * ROWS
        part = item // (KV_HEADS * all_tiles)
        top_tile, num_tiles, end = find_range(first_line, num_lines, before, part, parts, WINDOW, GROUP, ROWS, KEYS)
        num_tiles = gl.where(item >= 0, num_tiles, 0)
        line = first_line + half * LINES
        if SHARED and (num_tiles == 0) & (item >= 0):
            _leave_out(
                weight_ptr, start - base, line, num_lines, head, part, parts, GROUP, KV_HEADS, LINES
            )  # fmt: skip
        if num_tiles > 0:
            lowest = before + first_line // GROUP
            num_masked = gl.minimum(gl.maximum(top_tile + 1 - (lowest + 1) // KEYS, 1), num_tiles)
            num_whole = num_tiles
            if WINDOW > 0:
                whole_from = gl.cdiv(gl.maximum(end - WINDOW, 0), KEYS)
                num_whole = gl.minimum(gl.maximum(top_tile + 1 - whole_from, num_masked), num_tiles)
            lines = line + gl.arange(0, LINES, layout=gl.SliceLayout(1, LOAD))
            columns = (head * GROUP + lines % GROUP) * HEAD_DIM
            row = (start + lines // GROUP).to(gl.int64)
            dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOAD))
            inside = (lines < num_lines)[:, None] & (dims < HEAD_DIM)[None, :]
            loaded = gl.load(q_ptr + (row * q_stride + columns)[:, None] + dims[None, :], mask=inside, other=0.0)
            q.store(loaded)
            fence_async_shared()
            gl.thread_barrier()
            total, top, mass = attend_item(
                q, line, before, count, top_tile, num_masked, num_whole, num_tiles, scale, k_tiles, v_tiles, k_full,
                k_empty, v_full, v_empty, my_turn, next_turn,
                FIRST, WINDOW, GROUP, LINES, KEYS, HEAD_DIM, STAGES, SCORES, TOTAL,
            )  # fmt: skip
            mass = gl.where(mass > 0, mass, 1.0)
            portion = gl.where(slot >= 0, 1.0 / mass, 0.0)
            total = total * gl.convert_layout(portion, gl.SliceLayout(1, TOTAL))[:, None]
            # where to store is worked out anew, or it would hold registers while products run
            _store(
                q, total, top + gl.log2(mass), out_ptr, weight_ptr, start - base, warp_uniform(line), num_lines, head,
                part, parts, GROUP, KV_HEADS, HEAD_DIM, LINES, SHARED, LOAD, TOTAL,
            )  # fmt: skip
            count += num_tiles


@gluon.jit(
    do_not_specialize=["num_seqs", "parts"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "starts_ptr"],
)
def _prefill_kernel(
    desc, q_ptr, slots_ptr, positions_ptr, tables_ptr, starts_ptr, out_ptr, weight_ptr, q_stride, table_stride,
    num_seqs, parts, scale,
    WINDOW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SHARED: gl.constexpr, SEQS: gl.constexpr,
):  # fmt: skip
    # item (part, tile from the end, K/V head), the head fastest: part of the keys of that head of a tile of queries
    BLOCKS: gl.constexpr = KEYS // BLOCK_SIZE
    HALVES: gl.constexpr = HEAD_DIM // 64
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    all_tiles = count_tiles(starts_ptr, num_seqs, GROUP, ROWS)
    if gl.program_id(0) >= all_tiles * KV_HEADS * parts:
        return
    k_parts = gl.allocate_shared_memory(desc.dtype, [STAGES * HALVES * BLOCKS, BLOCK_SIZE, 64], LAYOUT)
    v_parts = gl.allocate_shared_memory(desc.dtype, [STAGES * HALVES * BLOCKS, BLOCK_SIZE, 64], LAYOUT)
    k_tiles = k_parts._reinterpret(desc.dtype, [STAGES, KEYS, HEAD_DIM], LAYOUT)
    v_tiles = v_parts._reinterpret(desc.dtype, [STAGES, KEYS, HEAD_DIM], LAYOUT)
    q_tiles = gl.allocate_shared_memory(desc.dtype, [2, ROWS // 2, HEAD_DIM], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (0, q_ptr, slots_ptr, positions_ptr, starts_ptr, out_ptr, weight_ptr, q_stride, num_seqs,
                        all_tiles, parts, scale, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
                        1, WINDOW, GROUP, KV_HEADS, HEAD_DIM, ROWS, KEYS, STAGES, SHARED, SEQS)),
            (_consume, (1, q_ptr, slots_ptr, positions_ptr, starts_ptr, out_ptr, weight_ptr, q_stride, num_seqs,
                        all_tiles, parts, scale, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
                        0, WINDOW, GROUP, KV_HEADS, HEAD_DIM, ROWS, KEYS, STAGES, SHARED, SEQS)),
            (produce, (desc, slots_ptr, positions_ptr, tables_ptr, starts_ptr, table_stride, num_seqs, all_tiles, parts,
                        k_parts, v_parts, k_full, k_empty, v_full, v_empty,
                        WINDOW, GROUP, KV_HEADS, BLOCK_SIZE, ROWS, KEYS, HALVES, STAGES, SEQS)),
        ],
        [4, 1],
        [240, 32],
    )  # fmt: skip


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def fits(q: Tensor, layer: Tensor) -> bool:
    """Whether `prefill_hopper` takes them."""
    head_dim, block_size = layer.shape[4], layer.shape[3]
    return (
        q.device.type == "cuda"
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype == layer.dtype
        and q.dtype == torch.bfloat16  # float16 and head size 64 compile and have not run
        and head_dim == 128
        and block_size in (16, 32, 64)
    )


def prefill_hopper(
    q: Tensor,
    layer: Tensor,
    seqs: PagedKVMetadata,
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
    blocks = TensorDescriptor.from_tensor(layer.view(-1, head_dim), [block_size, 64], _BLOCK_LAYOUT)
    # of sequences beyond the second one tiles come on top, but those of a graph are mostly empty
    items = (len(out) * group // ROWS + min(num_seqs, 2)) * kv_heads * splits
    processors = _processors(q.device)
    _prefill_kernel[(items if items < _ROUNDS * processors else processors,)](
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
        splits,
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
        SEQS=_SEQS,
        num_warps=4,
    )
