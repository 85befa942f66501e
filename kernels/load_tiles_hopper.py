"""The warp of `prefill_hopper` that brings keys and values: block by block, through the block table."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma


@gluon.jit
def _load_tile(desc, table_ptr, tile, first_block, last_block, first_line, BLOCK_LINES, buffer, barrier, stage,
               BLOCKS: gl.constexpr, BLOCK_SIZE: gl.constexpr, HALVES: gl.constexpr):  # fmt: skip
    mbarrier.expect(barrier, BLOCKS * BLOCK_SIZE * HALVES * 64 * 2)
    for b in gl.static_range(BLOCKS):
        # what lies wholly behind the window or the end may be somebody else's
        block = gl.load(table_ptr + gl.minimum(gl.maximum(tile * BLOCKS + b, first_block), last_block))
        line = block * BLOCK_LINES + first_line
        for h in gl.static_range(HALVES):
            tma.async_copy_global_to_shared(
                desc, [line, h * 64], barrier, buffer.index((stage * HALVES + h) * BLOCKS + b)
            )


@gluon.jit
def produce(
    desc, table_ptr, top_tile, num_tiles, first_block, last_block, head, k_parts, v_parts, k_full, k_empty, v_full,
    v_empty,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCKS: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: brings the tiles, the last first, each once its place is free."""
    lines = 2 * KV_HEADS * BLOCK_SIZE
    for i in range(num_tiles):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        _load_tile(desc, table_ptr, top_tile - i, first_block, last_block, head * BLOCK_SIZE, lines, k_parts,
                   k_full.index(stage), stage, BLOCKS, BLOCK_SIZE, HALVES)  # fmt: skip
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        _load_tile(desc, table_ptr, top_tile - i, first_block, last_block, (KV_HEADS + head) * BLOCK_SIZE, lines,
                   v_parts, v_full.index(stage), stage, BLOCKS, BLOCK_SIZE, HALVES)  # fmt: skip
