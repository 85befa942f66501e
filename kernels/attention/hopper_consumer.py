"""The inner loop of `prefill_hopper`: four warps that turn tiles of scores into shares while products run."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait


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
def _rounded(shares, q, TOTAL: gl.constexpr):
    """As the left operand of a product. By volatile assembly, which stays where it is: in front of the next scores'
    product there are registers for it, behind it there are not."""
    if q.dtype == gl.bfloat16:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [shares], dtype=q.dtype, is_pure=False, pack=2
        )
    else:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [shares], dtype=q.dtype, is_pure=False, pack=2
        )
    return gl.convert_layout(rounded, gl.DotOperandLayout(0, TOTAL, 2))


@gluon.jit
def _steps(
    begin, stop, count, top_tile, q, total, top, mass, shares, fade, positions, scale, k_tiles, v_tiles,
    k_full, k_empty, v_full, v_empty, my_turn, next_turn,
    FIRST: gl.constexpr, MASK: gl.constexpr, WINDOW: gl.constexpr, LINES: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr, TOTAL: gl.constexpr,
):  # fmt: skip
    """Main loop over key tiles `begin` to `stop`: the scores of tile i, and p @ V of tile i - 1.

    `count` tiles came before this item's. The two warpgroups take turns (FlashAttention-3's ping-pong): one runs its
    matrix products while the other computes its softmax.
    """
    for i in range(begin, stop):
        place = count + i
        stage = place % STAGES
        known = _rounded(shares, q, TOTAL)
        mbarrier.wait(my_turn, (place & 1) ^ FIRST)
        mbarrier.wait(k_full.index(stage), (place // STAGES) & 1)
        zeros = gl.zeros([LINES, KEYS], gl.float32, layout=SCORES)
        scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        before = (place - 1) % STAGES
        total = total * gl.convert_layout(fade, gl.SliceLayout(1, TOTAL))[:, None]
        mbarrier.wait(v_full.index(before), ((place - 1) // STAGES) & 1)
        total = warpgroup_mma(known, v_tiles.index(before), total, is_async=True)
        mbarrier.arrive(next_turn, count=1)
        scores = warpgroup_mma_wait(1, deps=[scores])
        _release(k_empty.index(stage))
        shares, fade, top, mass = _shares(scores, top, mass, top_tile - i, positions, scale, MASK, WINDOW, KEYS, SCORES)
        total, known = warpgroup_mma_wait(0, deps=[total, known])
        _release(v_empty.index(before))
    return total, top, mass, shares, fade


@gluon.jit
def attend_item(
    q, line, before, count, top_tile, num_masked, num_whole, num_tiles, scale, k_tiles, v_tiles, k_full, k_empty,
    v_full, v_empty, my_turn, next_turn,
    FIRST: gl.constexpr, WINDOW: gl.constexpr, GROUP: gl.constexpr, LINES: gl.constexpr, KEYS: gl.constexpr,
    HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, TOTAL: gl.constexpr,
):  # fmt: skip
    """Four warps: LINES queries, `line` being the first one's, on `num_tiles` tiles of keys from `top_tile` downwards.
    Returns the sum of values, in TOTAL, and each row's highest score and mass, in SCORES."""
    positions = before + (line + gl.arange(0, LINES, layout=gl.SliceLayout(1, SCORES))) // GROUP
    top = gl.full([LINES], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    mass = gl.zeros([LINES], gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.zeros([LINES, HEAD_DIM], gl.float32, layout=TOTAL)

    mbarrier.wait(my_turn, (count & 1) ^ FIRST)
    mbarrier.wait(k_full.index(count % STAGES), (count // STAGES) & 1)
    zeros = gl.zeros([LINES, KEYS], gl.float32, layout=SCORES)
    scores = warpgroup_mma(q, k_tiles.index(count % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.arrive(next_turn, count=1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _release(k_empty.index(count % STAGES))
    shares, fade, top, mass = _shares(scores, top, mass, top_tile, positions, scale, True, WINDOW, KEYS, SCORES)
    total, top, mass, shares, fade = _steps(
        1, num_masked, count, top_tile, q, total, top, mass, shares, fade, positions, scale, k_tiles,
        v_tiles, k_full, k_empty, v_full, v_empty, my_turn, next_turn,
        FIRST, True, WINDOW, LINES, KEYS, STAGES, SCORES, TOTAL,
    )  # fmt: skip
    total, top, mass, shares, fade = _steps(
        num_masked, num_whole, count, top_tile, q, total, top, mass, shares, fade, positions, scale,
        k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, my_turn, next_turn,
        FIRST, False, WINDOW, LINES, KEYS, STAGES, SCORES, TOTAL,
    )  # fmt: skip
    if WINDOW > 0:
        total, top, mass, shares, fade = _steps(
            num_whole, num_tiles, count, top_tile, q, total, top, mass, shares, fade, positions, scale,
            k_tiles, v_tiles, k_full, k_empty, v_full, v_empty, my_turn, next_turn,
            FIRST, True, WINDOW, LINES, KEYS, STAGES, SCORES, TOTAL,
        )  # fmt: skip
    last = count + num_tiles - 1
    total = total * gl.convert_layout(fade, gl.SliceLayout(1, TOTAL))[:, None]
    known = _rounded(shares, q, TOTAL)
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    total = warpgroup_mma(known, v_tiles.index(last % STAGES), total, is_async=True)
    total, known = warpgroup_mma_wait(0, deps=[total, known])
    _release(v_empty.index(last % STAGES))
    return total, top, mass
