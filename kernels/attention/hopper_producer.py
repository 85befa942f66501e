"""The producer warp of `prefill_hopper`, and the order of work items, which it shares with the consumers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def warp_uniform(number):
    """The same number, which ptxas then knows to be the same in all threads of a warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _count_tiles(query_start_ptr, seqs, num_seqs, GROUP: gl.constexpr, BLOCK_M: gl.constexpr):
    """Number of query tiles of each sequence."""
    inside = seqs < num_seqs
    rows = gl.load(query_start_ptr + seqs + 1, mask=inside, other=0) - gl.load(
        query_start_ptr + seqs, mask=inside, other=0
    )
    return gl.where(inside, gl.cdiv(rows * GROUP, BLOCK_M), 0)


@gluon.jit
def count_tiles(query_start_ptr, num_seqs, GROUP: gl.constexpr, BLOCK_M: gl.constexpr):
    """Number of query tiles of all sequences; a sequence without rows has none."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = 0
    for i in range(0, num_seqs, 128):
        total += gl.sum(
            _count_tiles(query_start_ptr, i + gl.arange(0, 128, layout=LAYOUT), num_seqs, GROUP, BLOCK_M), 0
        )
    return total


@gluon.jit
def find_item(turn, num_items):
    """The item of this program's next turn, -1 if none is left: back and forth over the programs, because items get
    shorter.
    """
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = programs - 1 - place
    item = turn * programs + place
    return gl.where(item < num_items, item, -1)


@gluon.jit
def find_sequence(
    tile, query_start_ptr, slots_ptr, positions_ptr, num_seqs,
    GROUP: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr, SEQS: gl.constexpr,
):  # fmt: skip
    """Finds a query tile's sequence: first and end tile, first row, rows of all tiles, slot and context length."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, WARPS], [1, 0])
    seq, first_tile, passed = 0, 0, 0
    for i in range(0, num_seqs, SEQS):
        mine = i + gl.arange(0, SEQS, layout=gl.SliceLayout(1, LAYOUT))
        others = i + gl.arange(0, SEQS, layout=gl.SliceLayout(0, LAYOUT))
        counts = _count_tiles(query_start_ptr, others, num_seqs, GROUP, BLOCK_M)
        up_to = passed + gl.sum(gl.where(others[None, :] <= mine[:, None], counts[None, :], 0), 1)
        over = (up_to <= tile) & (mine < num_seqs)
        seq += gl.sum(over.to(gl.int32), 0)
        first_tile = gl.maximum(first_tile, gl.max(gl.where(over, up_to, 0), 0))
        passed += gl.sum(counts, 0)
    seq, first_tile = warp_uniform(seq), warp_uniform(first_tile)
    start = gl.load(query_start_ptr + seq)
    num_m = (gl.load(query_start_ptr + seq + 1) - start) * GROUP
    slot = gl.load(slots_ptr + start).to(gl.int32)
    context_len = gl.load(positions_ptr + start).to(gl.int32)
    return first_tile, first_tile + gl.cdiv(num_m, BLOCK_M), start, num_m, slot, context_len


@gluon.jit
def find_range(
    start_m, num_m, context_len, split, num_splits,
    WINDOW: gl.constexpr, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Finds a split of a query tile's keys: the last key tile, the number of key tiles from it downwards (0: none), and
    the position behind the query tile's last row.
    """
    first_position = context_len + start_m // GROUP
    end = context_len + (gl.minimum(start_m + BLOCK_M, num_m) - 1) // GROUP + 1
    top_tile = (end - 1) // BLOCK_N
    low_tile = 0
    if WINDOW > 0:
        low_tile = gl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
    tiles_per_split = gl.cdiv(top_tile + 1 - low_tile, num_splits)
    low_tile += split * tiles_per_split
    top_tile = gl.minimum(low_tile + tiles_per_split - 1, top_tile)
    return top_tile, gl.maximum(top_tile + 1 - low_tile, 0), end


@gluon.jit
def next_item(
    turn, num_items, all_tiles, num_splits, first_tile, next_tile, start, num_m, slot, context_len, query_start_ptr,
    slots_ptr, positions_ptr, num_seqs,
    WINDOW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr, SEQS: gl.constexpr,
):  # fmt: skip
    """The work of this program's next turn: the item, its K/V head and split, `find_sequence` and `find_range` of it.

    `first_tile` to `context_len` come from the turn before: the sequence is looked up when the tile leaves it.
    There are 0 key tiles where no item is left.
    """
    item = find_item(turn, num_items)
    head, tile = item % KV_HEADS, all_tiles - 1 - item // KV_HEADS % all_tiles
    if (item >= 0) & ((tile < first_tile) | (tile >= next_tile)):
        first_tile, next_tile, start, num_m, slot, context_len = find_sequence(
            tile, query_start_ptr, slots_ptr, positions_ptr, num_seqs, GROUP, BLOCK_M, WARPS, SEQS
        )
    start_m = (tile - first_tile) * BLOCK_M
    split = item // (KV_HEADS * all_tiles)
    top_tile, num_tiles, end = find_range(
        start_m, num_m, context_len, split, num_splits, WINDOW, GROUP, BLOCK_M, BLOCK_N
    )
    num_tiles = gl.where(item >= 0, num_tiles, 0)
    return (
        item, head, split, first_tile, next_tile, start, num_m, slot, context_len, start_m, top_tile, num_tiles, end
    )  # fmt: skip


@gluon.jit
def _find_blocks(table_ptr, tile, first_block, last_block, BLOCKS: gl.constexpr):
    """Block ids of a key tile, loaded without waiting in between."""
    blocks = ()
    for b in gl.static_range(BLOCKS):
        # blocks behind the window or the end may belong to another sequence
        block = gl.load(table_ptr + gl.minimum(gl.maximum(tile * BLOCKS + b, first_block), last_block))
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005, kernels do not unpack
    return blocks


@gluon.jit
def _load_tile(
    desc, blocks, head_row, block_rows, buffer, barrier, stage,
    BLOCKS: gl.constexpr, BLOCK_SIZE: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Starts the TMA copies of a key or value tile; `barrier` completes when all have arrived."""
    mbarrier.expect(barrier, BLOCKS * BLOCK_SIZE * HALVES * 64 * 2)
    for b in gl.static_range(BLOCKS):
        kv_row = blocks[b] * block_rows + head_row
        for h in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                desc, [kv_row, h * 64], barrier, buffer.index((stage * HALVES + h) * BLOCKS + b)
            )


@gluon.jit
def produce(
    desc, slots_ptr, positions_ptr, tables_ptr, query_start_ptr, table_stride, num_seqs, all_tiles, num_splits,
    k_blocks, v_blocks, k_full, k_empty, v_full, v_empty,
    WINDOW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, SEQS: gl.constexpr,
):  # fmt: skip
    """One warp: loads the key and value tiles of all items, the last of each first, each once its stage is free."""
    BLOCKS: gl.constexpr = BLOCK_N // BLOCK_SIZE
    block_rows = 2 * KV_HEADS * BLOCK_SIZE
    all_tiles = warp_uniform(all_tiles)
    num_items = all_tiles * KV_HEADS * num_splits
    first_tile, next_tile, start, num_m, slot, context_len = 0, 0, 0, 0, 0, 0
    count = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        (
            _item, head, _split, first_tile, next_tile, start, num_m, slot, context_len, start_m, top_tile, num_tiles,
            end,
        ) = next_item(
            turn, num_items, all_tiles, num_splits, first_tile, next_tile, start, num_m, slot, context_len,
            query_start_ptr, slots_ptr, positions_ptr, num_seqs, WINDOW, GROUP, KV_HEADS, BLOCK_M, BLOCK_N, 1, SEQS,
        )  # fmt: skip
        first_block = 0
        if WINDOW > 0:
            first_block = gl.maximum(context_len + start_m // GROUP - WINDOW + 1, 0) // BLOCK_SIZE
        last_block = (end - 1) // BLOCK_SIZE
        table_ptr = (
            tables_ptr + gl.maximum(slot, 0).to(gl.int64) * table_stride
        )  # a padding sequence reads slot 0 and does not use it
        for i in range(num_tiles):
            stage = (count + i) % STAGES
            phase = ((count + i) // STAGES) & 1
            blocks = _find_blocks(table_ptr, top_tile - i, first_block, last_block, BLOCKS)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _load_tile(
                desc, blocks, head * BLOCK_SIZE, block_rows, k_blocks, k_full.index(stage), stage, BLOCKS, BLOCK_SIZE,
                HALVES,
            )  # fmt: skip
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            _load_tile(
                desc, blocks, (KV_HEADS + head) * BLOCK_SIZE, block_rows, v_blocks, v_full.index(stage), stage, BLOCKS,
                BLOCK_SIZE, HALVES,
            )  # fmt: skip
        count += num_tiles
