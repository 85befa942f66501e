"""What the warps of `prefill_hopper` share: which part of which tile comes when, and the warp that brings keys and
values for it, block by block through the block table."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def warp_uniform(number):
    """The same number, of which ptxas then knows that all threads of a warp have it."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _count(starts_ptr, seqs, num_seqs, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """Tiles of sequences."""
    inside = seqs < num_seqs
    rows = gl.load(starts_ptr + seqs + 1, mask=inside, other=0) - gl.load(starts_ptr + seqs, mask=inside, other=0)
    return gl.where(inside, gl.cdiv(rows * GROUP, ROWS), 0)


@gluon.jit
def count_tiles(starts_ptr, num_seqs, GROUP: gl.constexpr, ROWS: gl.constexpr):
    """Of all sequences; those without rows have none."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = 0
    for i in range(0, num_seqs, 128):
        total += gl.sum(_count(starts_ptr, i + gl.arange(0, 128, layout=LAYOUT), num_seqs, GROUP, ROWS), 0)
    return total


@gluon.jit
def find_item(turn, num_items):
    """The item of this program's next turn: back and forth over the programs, as items get shorter. -1: none is left
    (a program whose last turn is cut off)."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    if turn % 2 == 1:
        place = programs - 1 - place
    item = turn * programs + place
    return gl.where(item < num_items, item, -1)


@gluon.jit
def find_sequence(tile, starts_ptr, slots_ptr, positions_ptr, num_seqs,
                  GROUP: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, SEQS: gl.constexpr):  # fmt: skip
    """Of a tile: its sequence's first tile and the one behind its last, first row, lines, slot and first position."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, WARPS], [1, 0])
    seq, first_tile, passed = 0, 0, 0
    for i in range(0, num_seqs, SEQS):
        mine = i + gl.arange(0, SEQS, layout=gl.SliceLayout(1, LAYOUT))
        others = i + gl.arange(0, SEQS, layout=gl.SliceLayout(0, LAYOUT))
        counts = _count(starts_ptr, others, num_seqs, GROUP, ROWS)
        up_to = passed + gl.sum(gl.where(others[None, :] <= mine[:, None], counts[None, :], 0), 1)
        over = (up_to <= tile) & (mine < num_seqs)
        seq += gl.sum(over.to(gl.int32), 0)
        first_tile = gl.maximum(first_tile, gl.max(gl.where(over, up_to, 0), 0))
        passed += gl.sum(counts, 0)
    seq, first_tile = warp_uniform(seq), warp_uniform(first_tile)
    start = gl.load(starts_ptr + seq)
    num_lines = (gl.load(starts_ptr + seq + 1) - start) * GROUP
    slot = gl.load(slots_ptr + start).to(gl.int32)
    before = gl.load(positions_ptr + start).to(gl.int32)
    return first_tile, first_tile + gl.cdiv(num_lines, ROWS), start, num_lines, slot, before


@gluon.jit
def find_range(first_line, num_lines, before, part, parts,
               WINDOW: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr):  # fmt: skip
    """Of part `part` of a tile's keys: the last tile of keys, how many there are from it downwards (0: none), and the
    position behind the tile's last row."""
    lowest = before + first_line // GROUP
    end = before + (gl.minimum(first_line + ROWS, num_lines) - 1) // GROUP + 1
    top_tile = (end - 1) // KEYS
    low_tile = 0
    if WINDOW > 0:
        low_tile = gl.maximum(lowest - WINDOW + 1, 0) // KEYS
    share = gl.cdiv(top_tile + 1 - low_tile, parts)
    low_tile += part * share
    top_tile = gl.minimum(low_tile + share - 1, top_tile)
    return top_tile, gl.maximum(top_tile + 1 - low_tile, 0), end


@gluon.jit
def _find_blocks(table_ptr, tile, first_block, last_block, BLOCKS: gl.constexpr):
    """Of a tile, one after the other without waiting in between."""
    blocks = ()
    for b in gl.static_range(BLOCKS):
        # what lies wholly behind the window or the end may be somebody else's
        block = gl.load(table_ptr + gl.minimum(gl.maximum(tile * BLOCKS + b, first_block), last_block))
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005, kernels do not unpack
    return blocks


@gluon.jit
def _load_tile(desc, blocks, first_line, BLOCK_LINES, buffer, barrier, stage,
               BLOCKS: gl.constexpr, BLOCK_SIZE: gl.constexpr, HALVES: gl.constexpr):  # fmt: skip
    mbarrier.expect(barrier, BLOCKS * BLOCK_SIZE * HALVES * 64 * 2)
    for b in gl.static_range(BLOCKS):
        line = blocks[b] * BLOCK_LINES + first_line
        for h in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                desc, [line, h * 64], barrier, buffer.index((stage * HALVES + h) * BLOCKS + b)
            )


@gluon.jit
def produce(
    desc, slots_ptr, positions_ptr, tables_ptr, starts_ptr, table_stride, num_seqs, all_tiles, parts, k_parts, v_parts,
    k_full, k_empty, v_full, v_empty,
    WINDOW: gl.constexpr, GROUP: gl.constexpr, KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, ROWS: gl.constexpr,
    KEYS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, SEQS: gl.constexpr,
):  # fmt: skip
    """One warp: brings the tiles of all items, the last of each first, each once its place is free."""
    BLOCKS: gl.constexpr = KEYS // BLOCK_SIZE
    block_lines = 2 * KV_HEADS * BLOCK_SIZE
    all_tiles = warp_uniform(all_tiles)
    num_items = all_tiles * KV_HEADS * parts
    first_tile, next_tile, _start, num_lines, slot, before = 0, 0, 0, 0, 0, 0
    count = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        item = find_item(turn, num_items)
        head, tile = item % KV_HEADS, all_tiles - 1 - item // KV_HEADS % all_tiles
        if (item >= 0) & ((tile < first_tile) | (tile >= next_tile)):
            first_tile, next_tile, _start, num_lines, slot, before = find_sequence(
                tile, starts_ptr, slots_ptr, positions_ptr, num_seqs, GROUP, ROWS, 1, SEQS
            )
        first_line = (tile - first_tile) * ROWS
        part = item // (KV_HEADS * all_tiles)
        top_tile, num_tiles, end = find_range(first_line, num_lines, before, part, parts, WINDOW, GROUP, ROWS, KEYS)
        num_tiles = gl.where(item >= 0, num_tiles, 0)
        first_block = 0
        if WINDOW > 0:
            first_block = gl.maximum(before + first_line // GROUP - WINDOW + 1, 0) // BLOCK_SIZE
        last_block = (end - 1) // BLOCK_SIZE
        table_ptr = tables_ptr + gl.maximum(slot, 0).to(gl.int64) * table_stride  # of no slot: read, and not used
        for i in range(num_tiles):
            stage = (count + i) % STAGES
            phase = ((count + i) // STAGES) & 1
            blocks = _find_blocks(table_ptr, top_tile - i, first_block, last_block, BLOCKS)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _load_tile(desc, blocks, head * BLOCK_SIZE, block_lines, k_parts, k_full.index(stage), stage,
                       BLOCKS, BLOCK_SIZE, HALVES)  # fmt: skip
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            _load_tile(desc, blocks, (KV_HEADS + head) * BLOCK_SIZE, block_lines, v_parts, v_full.index(stage), stage,
                       BLOCKS, BLOCK_SIZE, HALVES)  # fmt: skip
        count += num_tiles
