"""`paged_prefill` for Hopper GPUs, in Gluon: a producer warp that loads, and two consumer warpgroups that compute.

After FlashAttention-3 (https://arxiv.org/abs/2407.08608): the producer copies blocks of keys and values by TMA into
shared memory, where they form the tiles that the tensor cores read. While a warpgroup computes the softmax of one
tile, the matrix products of the tile before run. Blocks behind a sequence's end are not read, but the rest of its last
block is, and is multiplied by 0: it must be finite.
"""

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from blockyard.kernels.attention.attention_tiles import check_sinks
from blockyard.kernels.attention.hopper_consumer import add_sinks, attend_item
from blockyard.kernels.attention.hopper_producer import count_tiles, next_item, produce, warp_uniform
from blockyard.kernels.attention.prefill_splits import split_prefill
from blockyard.kernels.attention.score_rules import LOG2E, ScoreRules
from blockyard.kernels.gpu_facts import num_multiprocessors
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata, check_attention_inputs, check_query_ranges

BLOCK_M = 128  # rows of a query tile, half of them for each warpgroup


class Tiles(NamedTuple):
    """Tiles of a head size."""

    block_n: int  # keys of a tile
    stages: int  # tiles of keys, and of values, in shared memory
    key_us: float  # us a key of a program, one of which runs at a time on a multiprocessor


_TILES = {64: Tiles(128, 4, 0.009), 128: Tiles(128, 2, 0.0125), 256: Tiles(64, 2, 0.024)}
_SEQS = 16  # sequences that are searched at a time
_ROUNDS = 3  # rounds of persistent programs; with fewer each item has a program, because padding items end soon
_BLOCK_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)  # constructing it takes 5 us


@gluon.jit
def _store_empty(
    lse_ptr, row, half_start_m, num_m, head, split, num_splits,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HALF_M: gl.constexpr,
):  # fmt: skip
    """A split without key tiles stores a log-sum-exp of -inf, and no output."""
    offs_m = half_start_m + gl.arange(0, HALF_M, layout=gl.BlockedLayout([1], [32], [4], [0]))
    out_rows = (row + offs_m // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + head * GROUP + offs_m % GROUP
    gl.store(lse_ptr + out_rows * num_splits + split, float("-inf"), mask=offs_m < num_m)


@gluon.jit
def _store(
    q, acc, lse, out_ptr, lse_ptr, row, half_start_m, num_m, head, split, num_splits,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, HALF_M: gl.constexpr, SPLIT_KV: gl.constexpr,
    LOAD: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Stores the output of half a query tile, and its log-sum-exp if keys are split."""
    OWN: gl.constexpr = ACC if out_ptr.dtype.element_ty == gl.float32 else LOAD
    offs_m = half_start_m + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, OWN))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OWN))
    inside = (offs_m < num_m)[:, None] & (dims < HEAD_DIM)[None, :]
    out_rows = (row + offs_m // GROUP).to(gl.int64) * (KV_HEADS * GROUP) + head * GROUP + offs_m % GROUP
    if SPLIT_KV:
        out_rows = out_rows * num_splits + split
        gl.store(lse_ptr + out_rows, gl.convert_layout(lse, gl.SliceLayout(1, OWN)), mask=offs_m < num_m)
    pointers = out_ptr + out_rows[:, None] * HEAD_DIM + dims[None, :]
    if out_ptr.dtype.element_ty == gl.float32:
        gl.store(pointers, acc, mask=inside)
    else:
        q.store(acc.to(out_ptr.dtype.element_ty))  # in the layout of accumulators a row is spread over threads
        gl.thread_barrier()
        gl.store(pointers, q.load(LOAD), mask=inside)


@gluon.jit
def _consume(
    half, q_ptr, slots_ptr, positions_ptr, query_start_ptr, out_ptr, lse_ptr, q_stride, num_seqs, all_tiles,
    num_splits, scale, sinks_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, turns,
    FIRST: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SPLIT_KV: gl.constexpr, SEQS: gl.constexpr,
):  # fmt: skip
    """A consumer warpgroup: attention of half the rows of each item to all its keys."""
    HALF_M: gl.constexpr = BLOCK_M // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    base = gl.load(query_start_ptr)
    q = q_tiles.index(half)
    my_turn, next_turn = turns.index(half), turns.index(1 - half)
    all_tiles = warp_uniform(all_tiles)
    num_items = all_tiles * KV_HEADS * num_splits
    first_tile, next_tile, start, num_m, slot, context_len = 0, 0, 0, 0, 0, 0
    count = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        (
            item, head, split, first_tile, next_tile, start, num_m, slot, context_len, start_m, top_tile, num_tiles,
            end,
        ) = next_item(
            turn, num_items, all_tiles, num_splits, first_tile, next_tile, start, num_m, slot, context_len,
            query_start_ptr, slots_ptr, positions_ptr, num_seqs, WINDOW, GROUP, KV_HEADS, BLOCK_M, BLOCK_N, 4, SEQS,
        )  # fmt: skip
        half_start_m = start_m + half * HALF_M
        if SPLIT_KV and (num_tiles == 0) & (item >= 0):
            _store_empty(lse_ptr, start - base, half_start_m, num_m, head, split, num_splits, GROUP, KV_HEADS, HALF_M)
        if num_tiles > 0:
            first_position = context_len + start_m // GROUP
            num_masked = gl.minimum(gl.maximum(top_tile + 1 - (first_position + 1) // BLOCK_N, 1), num_tiles)
            num_whole = num_tiles
            if WINDOW > 0:
                whole_from = gl.cdiv(gl.maximum(end - WINDOW, 0), BLOCK_N)
                num_whole = gl.minimum(gl.maximum(top_tile + 1 - whole_from, num_masked), num_tiles)
            offs_m = half_start_m + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, LOAD))
            columns = (head * GROUP + offs_m % GROUP) * HEAD_DIM
            row = (start + offs_m // GROUP).to(gl.int64)
            dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOAD))
            inside = (offs_m < num_m)[:, None] & (dims < HEAD_DIM)[None, :]
            loaded = gl.load(q_ptr + (row * q_stride + columns)[:, None] + dims[None, :], mask=inside, other=0.0)
            q.store(loaded)
            fence_async_shared()
            gl.thread_barrier()
            acc, m_i, l_i = attend_item(
                q, half_start_m, context_len, count, top_tile, num_masked, num_whole, num_tiles, scale, k_tiles,
                v_tiles, k_full, k_empty, v_full, v_empty, my_turn, next_turn, FIRST, WINDOW, CAP, GROUP, HALF_M,
                BLOCK_N, HEAD_DIM, STAGES, SCORES, ACC,
            )  # fmt: skip
            if SINKS and not SPLIT_KV:
                l_i = add_sinks(l_i, m_i, sinks_ptr, head, half_start_m, GROUP, HALF_M, SCORES)
            l_i = gl.where(l_i > 0, l_i, 1.0)
            scale_out = gl.where(slot >= 0, 1.0 / l_i, 0.0)
            acc = acc * gl.convert_layout(scale_out, gl.SliceLayout(1, ACC))[:, None]
            # addresses are computed again: kept, they would hold registers while products run
            _store(
                q, acc, m_i + gl.log2(l_i), out_ptr, lse_ptr, start - base, warp_uniform(half_start_m), num_m, head,
                split, num_splits, GROUP, KV_HEADS, HEAD_DIM, HALF_M, SPLIT_KV, LOAD, ACC,
            )  # fmt: skip
            count += num_tiles


@gluon.jit(
    do_not_specialize=["num_seqs", "num_splits"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "query_start_ptr"],
)
def _prefill_hopper_kernel(
    desc, q_ptr, slots_ptr, positions_ptr, tables_ptr, query_start_ptr, out_ptr, lse_ptr, q_stride, table_stride,
    num_seqs, num_splits, scale, sinks_ptr,
    WINDOW: gl.constexpr, CAP: gl.constexpr, SINKS: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, SPLIT_KV: gl.constexpr, SEQS: gl.constexpr,
):  # fmt: skip
    # item (split, query tile from the end, K/V head), the head fastest
    BLOCKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    HALVES: gl.constexpr = HEAD_DIM // 64
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    all_tiles = count_tiles(query_start_ptr, num_seqs, GROUP, BLOCK_M)
    if gl.program_id(0) >= all_tiles * KV_HEADS * num_splits:
        return
    k_blocks = gl.allocate_shared_memory(desc.dtype, [STAGES * HALVES * BLOCKS, BLOCK_SIZE, 64], LAYOUT)
    v_blocks = gl.allocate_shared_memory(desc.dtype, [STAGES * HALVES * BLOCKS, BLOCK_SIZE, 64], LAYOUT)
    k_tiles = k_blocks._reinterpret(desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], LAYOUT)
    v_tiles = v_blocks._reinterpret(desc.dtype, [STAGES, BLOCK_N, HEAD_DIM], LAYOUT)
    q_tiles = gl.allocate_shared_memory(desc.dtype, [2, BLOCK_M // 2, HEAD_DIM], LAYOUT)
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
            (_consume, (0, q_ptr, slots_ptr, positions_ptr, query_start_ptr, out_ptr, lse_ptr, q_stride, num_seqs,
                        all_tiles, num_splits, scale, sinks_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full,
                        v_empty, turns, 1, WINDOW, CAP, SINKS, GROUP, KV_HEADS, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES,
                        SPLIT_KV, SEQS)),
            (_consume, (1, q_ptr, slots_ptr, positions_ptr, query_start_ptr, out_ptr, lse_ptr, q_stride, num_seqs,
                        all_tiles, num_splits, scale, sinks_ptr, q_tiles, k_tiles, v_tiles, k_full, k_empty, v_full,
                        v_empty, turns, 0, WINDOW, CAP, SINKS, GROUP, KV_HEADS, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES,
                        SPLIT_KV, SEQS)),
            (produce, (desc, slots_ptr, positions_ptr, tables_ptr, query_start_ptr, table_stride, num_seqs, all_tiles,
                       num_splits, k_blocks, v_blocks, k_full, k_empty, v_full, v_empty,
                        WINDOW, GROUP, KV_HEADS, BLOCK_SIZE, BLOCK_M, BLOCK_N, HALVES, STAGES, SEQS)),
        ],
        [4, 1],
        [240, 32],
    )  # fmt: skip


def prefill_hopper(
    q: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    query_start_loc: Tensor,
    rules: ScoreRules,
    max_seq_len: int,
    out: Tensor,
) -> None:
    """Computes `paged_prefill` for bfloat16, blocks of 16, 32 or 64 tokens, and heads of 64, 128 or 256 numbers.

    A window slides: chunks are not supported. Runs if `gpu_facts.runs_hopper_kernels`.
    """
    (_, heads, head_dim), (kv_heads, block_size) = q.shape, layer.shape[2:4]
    check_attention_inputs(q, layer, metadata, None)
    check_query_ranges(q, query_start_loc, out)
    check_sinks(q, rules.sinks)
    group, num_seqs, tiles = heads // kv_heads, len(query_start_loc) - 1, _TILES[head_dim]
    if num_seqs < 1 or not len(out):
        return
    splits = split_prefill(q, kv_heads, rules, max_seq_len, out, BLOCK_M, 1, tiles.key_us)
    blocks = TensorDescriptor.from_tensor(layer.view(-1, head_dim), [block_size, 64], _BLOCK_LAYOUT)
    # further sequences add tiles too, but in a padded graph most of these are empty
    items = (len(out) * group // BLOCK_M + min(num_seqs, 2)) * kv_heads * splits.num
    programs = num_multiprocessors(q.device)
    _prefill_hopper_kernel[(items if items < _ROUNDS * programs else programs,)](
        blocks, q, metadata.slots, metadata.positions, metadata.tables, query_start_loc, splits.out, splits.lse,
        q.stride(0), metadata.tables.stride(0), num_seqs, splits.num, rules.scale * LOG2E,
        splits.lse if rules.sinks is None else rules.sinks,
        WINDOW=rules.window or 0, CAP=rules.soft_cap or 0.0, SINKS=rules.sinks is not None, GROUP=group,
        KV_HEADS=kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, BLOCK_M=BLOCK_M, BLOCK_N=tiles.block_n,
        STAGES=tiles.stages, SPLIT_KV=splits.num > 1, SEQS=_SEQS, num_warps=4,
    )  # fmt: skip
    splits.combine(out, rules)
