"""`latent_decode` for Hopper GPUs, in Gluon: two producer warps that load, and two consumer warpgroups that compute.

After FlashMLA (https://github.com/deepseek-ai/FlashMLA): 64 heads are the rows of a tile, and each warpgroup has half
of the columns of their output. The first computes scores and probabilities, and hands the probabilities to the second
through shared memory; its half of the output comes before its next scores. A tile of 64 keys is in shared memory once,
for scores and values. It comes in three parts, each of which is loaded again as soon as it is free: the rotated
numbers, and the two halves of the latent. The rest of a sequence's last block is read and multiplied by 0: it must be
finite.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.attention.latent.latent_decode import (
    check_latent_inputs,
    check_latent_output,
    check_latent_schedule,
    combine_latent,
)
from blockyard.kernels.attention.score_rules import LOG2E, ScoreRules
from blockyard.kernels.attention.split_kv import SplitKVSchedule, schedule_split_kv
from blockyard.kernels.gpu_facts import num_multiprocessors
from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_HEADS_OF_TILE = 64
_BLOCK_N = 64
_STAGES = 2
_BLOCK_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)  # constructing it takes 5 us


@gluon.jit
def _load_item(work_ptr, split, max_splits):
    """Loads a split of the schedule: row, slot, first key, end of keys, splits of the row."""
    item_ptr = work_ptr + split
    return (
        gl.load(item_ptr).to(gl.int64), gl.load(item_ptr + max_splits).to(gl.int64),
        gl.load(item_ptr + 2 * max_splits), gl.load(item_ptr + 3 * max_splits), gl.load(item_ptr + 4 * max_splits),
    )  # fmt: skip


@gluon.jit
def _release(barrier):
    """Tells another partition that this one has read or written shared memory."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _find_blocks(table_ptr, start, stop, BLOCKS: gl.constexpr, BLOCK_SIZE: gl.constexpr):
    """First rows of the blocks of the tile at key `start`; negative behind the end, where copies then write zeros."""
    rows = ()
    for b in gl.static_range(BLOCKS):
        inside = start + b * BLOCK_SIZE < stop
        block = gl.load(table_ptr + start // BLOCK_SIZE + b, mask=inside, other=-1).to(gl.int32)
        rows = rows + (block * BLOCK_SIZE,)  # type: ignore[assignment]  # noqa: RUF005, kernels do not unpack
    return rows


@gluon.jit
def _load_part(
    desc, rows, column, chunks, barrier, first,
    PARTS: gl.constexpr, BLOCKS: gl.constexpr, BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    """Starts the copies of 64 * PARTS columns of a tile; `barrier` completes when all have arrived."""
    mbarrier.expect(barrier, BLOCKS * BLOCK_SIZE * PARTS * 64 * 2)
    for c in gl.static_range(PARTS):
        for b in gl.static_range(BLOCKS):
            target = chunks.index(first + c * BLOCKS + b)
            tma.async_copy_global_to_shared(desc, [rows[b], column + c * 64], barrier, target)


@gluon.jit
def _produce(
    desc, tables_ptr, work_ptr, starts_ptr, table_stride, max_splits, latent_chunks, latent_full, latent_empty,
    rotated_chunks, rotated_full, rotated_empty,
    HALF: gl.constexpr, TILES: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """One warp: loads half of the latent of the tiles of all splits, the left one with the rotated numbers.

    Each part once its place is free. A copy is of one block and 64 columns, so that a warp starts many.
    """
    BLOCKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    if PDL:
        gdc_wait()
    starts_ptr += gl.program_id(0) // TILES
    first, last = gl.load(starts_ptr), gl.load(starts_ptr + 1)
    count = 0
    for split in range(first, last):
        _row, slot, begin, stop, _num_splits = _load_item(work_ptr, split, max_splits)
        table_ptr = tables_ptr + slot * table_stride
        for start in range(begin, stop, BLOCK_N):
            rows = _find_blocks(table_ptr, start, stop, BLOCKS, BLOCK_SIZE)
            stage = count % STAGES
            phase = ((count // STAGES) & 1) ^ 1
            if HALF == 0:
                mbarrier.wait(rotated_empty.index(stage), phase)
                _load_part(
                    desc, rows, 512, rotated_chunks, rotated_full.index(stage), stage * BLOCKS, 1, BLOCKS, BLOCK_SIZE
                )
            mbarrier.wait(latent_empty.index(stage), phase)
            _load_part(
                desc, rows, HALF * 256, latent_chunks, latent_full.index(stage), (stage * 2 + HALF) * 4 * BLOCKS, 4,
                BLOCKS, BLOCK_SIZE,
            )  # fmt: skip
            count += 1


@gluon.jit
def _store_half(
    acc, scale_out, out_ptr, partial_out_ptr, row, split, num_splits, first_head, half,
    HEADS: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Stores 256 columns of the output of a split, or of the row if that has no other."""
    heads = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, ACC))
    columns = half * 256 + gl.arange(0, 256, layout=gl.SliceLayout(0, ACC))
    inside = (heads < HEADS)[:, None] & (columns < 512)[None, :]
    acc = acc * scale_out[:, None]
    places = heads[:, None] * 512 + columns[None, :]
    if num_splits == 1:
        gl.store(out_ptr + row * (HEADS * 512) + places, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        gl.store(partial_out_ptr + split.to(gl.int64) * (HEADS * 512) + places, acc, mask=inside)


@gluon.jit
def _start_scores(
    count, q_left, q_right, q_rotated, left_tiles, right_tiles, rotated_tiles, rotated_full, left_full, right_full,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Starts the products of all queries with the keys of a tile, as its parts arrive."""
    stage = count % STAGES
    phase = (count // STAGES) & 1
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=SCORES)
    mbarrier.wait(rotated_full.index(stage), phase)
    scores = warpgroup_mma(q_rotated, rotated_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(left_full.index(stage), phase)
    scores = warpgroup_mma(q_left, left_tiles.index(stage * 2).permute((1, 0)), scores, is_async=True)
    mbarrier.wait(right_full.index(stage), phase)
    return warpgroup_mma(q_right, right_tiles.index(stage * 2 + 1).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _online_softmax(scores, m_i, l_i, num_keys, scale, BLOCK_N: gl.constexpr, SCORES: gl.constexpr):
    """p of a tile of scores, of which `num_keys` exist, alpha, and the new m_i and l_i."""
    keys = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    scores = gl.where((keys < num_keys)[None, :], scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * scale)  # finite: a tile has at least one key
    p = gl.exp2(scores * scale - m_new[:, None])
    alpha = gl.exp2(m_i - m_new)
    return p, alpha, m_new, l_i * alpha + gl.sum(p, 1)


@gluon.jit
def _publish(rounded, factors, p_tile, factor_tile, p_full, p_empty, passed):
    """Hands probabilities and factors of rows to the other warpgroup, once it has read those before."""
    mbarrier.wait(p_empty, (passed & 1) ^ 1)
    p_tile.store(rounded)
    factor_tile.store(factors)
    fence_async_shared()
    _release(p_full)


@gluon.jit
def _load_query(
    q_ptr, q_row, q_head, rotated_ptr, rotated_row, rotated_head, row, first_head, q_left, q_right, q_rotated,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Copies the query of 64 heads of a row to shared memory, zeros for heads that do not exist."""
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    heads = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    halves = gl.arange(0, 256, layout=gl.SliceLayout(0, LOAD))
    rotated = gl.arange(0, 64, layout=gl.SliceLayout(0, LOAD))
    places = q_ptr + row * q_row + heads[:, None] * q_head + halves[None, :]
    inside = (heads < HEADS)[:, None] & (halves < 256)[None, :]
    left = gl.load(places, mask=inside, other=0.0)
    right = gl.load(places + 256, mask=inside, other=0.0)
    places = rotated_ptr + row * rotated_row + heads[:, None] * rotated_head + rotated[None, :]
    turned = gl.load(places, mask=(heads < HEADS)[:, None] & (rotated < 64)[None, :], other=0.0)
    q_left.store(left)
    q_right.store(right)
    q_rotated.store(turned)
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _score(
    q_ptr, rotated_ptr, work_ptr, starts_ptr, partial_out_ptr, lse_ptr, out_ptr, q_row, q_head, rotated_row,
    rotated_head, max_splits, scale, q_left, q_right, q_rotated, left_tiles, rotated_tiles, p_tile, factor_tile,
    rotated_full, rotated_empty, left_full, left_empty, right_full, p_full, p_empty,
    HEADS: gl.constexpr, TILES: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The first warpgroup: scores, probabilities, and the left half of the output."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    if PDL:
        gdc_wait()
    first_head = (gl.program_id(0) % TILES) * 64
    starts_ptr += gl.program_id(0) // TILES
    first, last = gl.load(starts_ptr), gl.load(starts_ptr + 1)
    count = 0  # tiles before this one
    passed = 0  # hand-overs to the other warpgroup
    for split in range(first, last):
        row, _slot, begin, stop, num_splits = _load_item(work_ptr, split, max_splits)
        _load_query(
            q_ptr, q_row, q_head, rotated_ptr, rotated_row, rotated_head, row, first_head, q_left, q_right, q_rotated,
            HEADS,
        )  # fmt: skip
        m_i = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
        l_i = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
        acc = gl.zeros([64, 256], gl.float32, layout=ACC)
        if stop > begin:
            scores = _start_scores(
                count, q_left, q_right, q_rotated, left_tiles, left_tiles, rotated_tiles, rotated_full, left_full,
                right_full, BLOCK_N, STAGES, SCORES,
            )  # fmt: skip
            scores = warpgroup_mma_wait(0, deps=[scores])
            _release(rotated_empty.index(count % STAGES))
            p, alpha, m_i, l_i = _online_softmax(scores, m_i, l_i, stop - begin, scale, BLOCK_N, SCORES)
            rounded = p.to(q_left.dtype)
            _publish(rounded, alpha, p_tile, factor_tile, p_full, p_empty, passed)
            for start in range(begin + BLOCK_N, stop, BLOCK_N):
                operand = gl.convert_layout(rounded, OPERAND)
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
                acc = warpgroup_mma(operand, left_tiles.index(count % STAGES * 2), acc, is_async=True)
                scores = _start_scores(
                    count + 1, q_left, q_right, q_rotated, left_tiles, left_tiles, rotated_tiles, rotated_full,
                    left_full, right_full, BLOCK_N, STAGES, SCORES,
                )  # fmt: skip
                # all but the three products of scores: the place of this tile is free early for the tile after the next
                acc, operand = warpgroup_mma_wait(3, deps=[acc, operand])
                _release(left_empty.index(count % STAGES))
                scores = warpgroup_mma_wait(0, deps=[scores])
                _release(rotated_empty.index((count + 1) % STAGES))
                p, alpha, m_i, l_i = _online_softmax(scores, m_i, l_i, stop - start, scale, BLOCK_N, SCORES)
                rounded = p.to(q_left.dtype)
                passed += 1
                _publish(rounded, alpha, p_tile, factor_tile, p_full, p_empty, passed)
                count += 1
            operand = gl.convert_layout(rounded, OPERAND)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
            acc = warpgroup_mma(operand, left_tiles.index(count % STAGES * 2), acc, is_async=True)
            acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
            _release(left_empty.index(count % STAGES))
            count += 1
            passed += 1
        scale_out = 1.0 / gl.where(l_i > 0, l_i, 1.0)
        mbarrier.wait(p_empty, (passed & 1) ^ 1)
        factor_tile.store(scale_out)
        _release(p_full)
        passed += 1
        _store_half(
            acc, gl.convert_layout(scale_out, gl.SliceLayout(1, ACC)), out_ptr, partial_out_ptr, row, split, num_splits,
            first_head, 0, HEADS, ACC,
        )  # fmt: skip
        if num_splits > 1:
            heads = first_head + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
            gl.store(lse_ptr + split * HEADS + heads, m_i + gl.log2(l_i), mask=heads < HEADS)


@gluon.jit
def _add_right(
    work_ptr, starts_ptr, partial_out_ptr, out_ptr, max_splits, right_tiles, p_tile, factor_tile, right_full,
    right_empty, p_full, p_empty,
    HEADS: gl.constexpr, TILES: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The second warpgroup: the right half of the output."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    if PDL:
        gdc_wait()
    first_head = (gl.program_id(0) % TILES) * 64
    starts_ptr += gl.program_id(0) // TILES
    first, last = gl.load(starts_ptr), gl.load(starts_ptr + 1)
    count = 0
    passed = 0
    for split in range(first, last):
        row, _slot, begin, stop, num_splits = _load_item(work_ptr, split, max_splits)
        acc = gl.zeros([64, 256], gl.float32, layout=ACC)
        for _start in range(begin, stop, BLOCK_N):
            stage = count % STAGES
            mbarrier.wait(right_full.index(stage), (count // STAGES) & 1)
            mbarrier.wait(p_full, passed & 1)
            acc = acc * factor_tile.load(gl.SliceLayout(1, ACC))[:, None]
            acc = warpgroup_mma(p_tile, right_tiles.index(stage * 2 + 1), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            gl.thread_barrier()
            mbarrier.arrive(p_empty, count=1)
            mbarrier.arrive(right_empty.index(stage), count=1)
            count += 1
            passed += 1
        mbarrier.wait(p_full, passed & 1)
        scale_out = factor_tile.load(gl.SliceLayout(1, ACC))
        _release(p_empty)
        passed += 1
        _store_half(
            acc, scale_out, out_ptr, partial_out_ptr, row, split, num_splits, first_head, 1, HEADS, ACC
        )  # fmt: skip


@gluon.jit(do_not_specialize=["max_splits"], do_not_specialize_on_alignment=["out_ptr"])
def _latent_hopper_kernel(
    desc, q_ptr, rotated_ptr, tables_ptr, work_ptr, starts_ptr, partial_out_ptr, lse_ptr, out_ptr, q_row, q_head,
    rotated_row, rotated_head, table_stride, max_splits, scale,
    HEADS: gl.constexpr, TILES: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    # program i: splits of program i // TILES of the schedule, for one tile of heads. Tiles of a split are neighbours,
    # so that its rows are still in the L2 cache
    if PDL:
        gdc_launch_dependents()  # its programs find no place on a multiprocessor that has one of these
    BLOCKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    latent_chunks = gl.allocate_shared_memory(desc.dtype, [STAGES * 8 * BLOCKS, BLOCK_SIZE, 64], LAYOUT)
    rotated_chunks = gl.allocate_shared_memory(desc.dtype, [STAGES * BLOCKS, BLOCK_SIZE, 64], LAYOUT)
    halves = latent_chunks._reinterpret(desc.dtype, [STAGES * 2, BLOCK_N, 256], LAYOUT)
    rotated_tiles = rotated_chunks._reinterpret(desc.dtype, [STAGES, BLOCK_N, 64], LAYOUT)
    q_left = gl.allocate_shared_memory(desc.dtype, [64, 256], LAYOUT)
    q_right = gl.allocate_shared_memory(desc.dtype, [64, 256], LAYOUT)
    q_rotated = gl.allocate_shared_memory(desc.dtype, [64, 64], LAYOUT)
    p_tile = gl.allocate_shared_memory(desc.dtype, [64, BLOCK_N], LAYOUT)
    factor_tile = gl.allocate_shared_memory(gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rotated_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    rotated_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    left_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    left_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    right_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(rotated_full.index(i), count=1)
        mbarrier.init(rotated_empty.index(i), count=1)
        mbarrier.init(left_full.index(i), count=1)
        mbarrier.init(left_empty.index(i), count=1)
        mbarrier.init(right_full.index(i), count=1)
        mbarrier.init(right_empty.index(i), count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_score, (q_ptr, rotated_ptr, work_ptr, starts_ptr, partial_out_ptr, lse_ptr, out_ptr, q_row, q_head,
                      rotated_row, rotated_head, max_splits, scale, q_left, q_right, q_rotated, halves, rotated_tiles,
                      p_tile, factor_tile, rotated_full, rotated_empty, left_full, left_empty, right_full, p_full,
                      p_empty, HEADS, TILES, BLOCK_N, STAGES, PDL)),
            (_add_right, (work_ptr, starts_ptr, partial_out_ptr, out_ptr, max_splits, halves, p_tile, factor_tile,
                          right_full, right_empty, p_full, p_empty, HEADS, TILES, BLOCK_N, STAGES, PDL)),
            (_produce, (desc, tables_ptr, work_ptr, starts_ptr, table_stride, max_splits, latent_chunks, left_full,
                        left_empty, rotated_chunks, rotated_full, rotated_empty, 0, TILES, BLOCK_SIZE, BLOCK_N, STAGES,
                        PDL)),
            (_produce, (desc, tables_ptr, work_ptr, starts_ptr, table_stride, max_splits, latent_chunks, right_full,
                        right_empty, rotated_chunks, rotated_full, rotated_empty, 1, TILES, BLOCK_SIZE, BLOCK_N, STAGES,
                        PDL)),
        ],
        [4, 1, 1],
        [216, 32, 32],
    )  # fmt: skip


def schedule_latent_hopper(
    q_latent: Tensor, metadata: PagedKVMetadata, rules: ScoreRules, max_seq_len: int
) -> SplitKVSchedule:
    """The schedule of a step for `latent_decode_hopper`, for all layers with as many heads."""
    _, heads, latent_dim = q_latent.shape
    tiles, programs = ceil_div(heads, _HEADS_OF_TILE), num_multiprocessors(q_latent.device)
    return schedule_split_kv(metadata, heads, tiles, latent_dim, rules, max_seq_len, programs)


def latent_decode_hopper(
    q_latent: Tensor,
    q_rotated: Tensor,
    layer: Tensor,
    metadata: PagedKVMetadata,
    rules: ScoreRules,
    max_seq_len: int,
    out: Tensor | None = None,
    schedule: SplitKVSchedule | None = None,
) -> Tensor:
    """Computes `latent_decode` for bfloat16, blocks of 16, 32 or 64 tokens, and rows of 512 and 64 numbers.

    schedule: of `schedule_latent_hopper`, made here if None. Runs if `gpu_facts.runs_hopper_kernels`.
    """
    heads, block_size = q_latent.shape[1], layer.shape[3]
    check_latent_inputs(q_latent, q_rotated, layer, metadata, None)
    out = check_latent_output(q_latent, out)
    if not len(out):
        return out
    if schedule is None:
        schedule = schedule_latent_hopper(q_latent, metadata, rules, max_seq_len)
    check_latent_schedule(schedule, out)
    tiles, pdl = ceil_div(heads, _HEADS_OF_TILE), supports_pdl(q_latent.device)
    blocks = TensorDescriptor.from_tensor(layer.view(-1, layer.shape[4]), [block_size, 64], _BLOCK_LAYOUT)
    _latent_hopper_kernel[(schedule.programs * tiles,)](
        blocks, q_latent, q_rotated, metadata.tables, schedule.work, schedule.starts, schedule.partial_out,
        schedule.lse, out, *q_latent.stride()[:2], *q_rotated.stride()[:2], metadata.tables.stride(0),
        schedule.work.shape[1], rules.scale * LOG2E,
        HEADS=heads, TILES=tiles, BLOCK_SIZE=block_size, BLOCK_N=_BLOCK_N, STAGES=_STAGES, PDL=pdl, num_warps=4,
        **pdl_options(pdl),
    )  # fmt: skip
    combine_latent(schedule, out, pdl)
    return out
