"""The main loop of a consumer warpgroup of `prefill_hopper`: softmax of one key tile while matrix products run."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _release(barrier):
    """Tells the producer that a stage is free."""
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def _online_softmax(
    scores, m_i, l_i, tile, positions, scale,
    MASK: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """p of a tile of scores, alpha, and the new m_i and l_i. scale includes log2(e)."""
    if CAP > 0:  # CAP * tanh(scores * scale / CAP), where the scale does not include log2(e)
        scores = CAP * LOG2E - 2 * CAP * LOG2E / (1 + gl.exp2(scores * (2 / CAP * scale)))
        scale = 1.0
    if MASK:
        keys = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
        visible = keys[None, :] <= positions[:, None]
        if WINDOW > 0:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) * scale)
    m_safe = m_new
    if MASK:
        m_safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    p = gl.exp2(scores * scale - m_safe[:, None])
    alpha = gl.exp2(m_i - m_safe)
    l_i = l_i * alpha + gl.sum(p, 1)
    return p, alpha, m_new, l_i


@gluon.jit
def _to_operand(p, q, ACC: gl.constexpr):
    """p as the left operand of a product, in q's dtype.

    The volatile assembly stays in front of the next scores' product, where there are registers for it; behind it there
    are none.
    """
    if q.dtype == gl.bfloat16:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=q.dtype, is_pure=False, pack=2
        )
    else:
        rounded = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [p], dtype=q.dtype, is_pure=False, pack=2
        )
    return gl.convert_layout(rounded, gl.DotOperandLayout(0, ACC, 2))


@gluon.jit
def add_sinks(
    l_i, m_i, sinks_ptr, head, start_m, GROUP: gl.constexpr, HALF_M: gl.constexpr, SCORES: gl.constexpr
):  # fmt: skip
    """l_i of HALF_M rows from `start_m` on, with the sinks of their query heads; see `attention_tiles.add_sinks`."""
    offs_m = start_m + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, SCORES))
    sinks = gl.load(sinks_ptr + head * GROUP + offs_m % GROUP)
    m_safe = gl.where(m_i == float("-inf"), 0.0, m_i)
    return l_i + gl.exp2(gl.minimum(sinks * LOG2E - m_safe, 126.0))


@gluon.jit
def _main_loop(
    begin, stop, count, top_tile, q, acc, m_i, l_i, p, alpha, positions, scale, k_tiles, v_tiles, k_full, k_empty,
    v_full, v_empty, my_turn, next_turn,
    FIRST: gl.constexpr, MASK: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, HALF_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Main loop over key tiles `begin` to `stop`: the scores of tile i, and p @ V of tile i - 1.

    `count` key tiles of earlier items went through the stages before this item's. The two warpgroups take turns
    (FlashAttention-3's ping-pong): one runs its matrix products while the other computes its softmax.
    """
    for i in range(begin, stop):
        place = count + i
        stage = place % STAGES
        operand = _to_operand(p, q, ACC)
        mbarrier.wait(my_turn, (place & 1) ^ FIRST)
        mbarrier.wait(k_full.index(stage), (place // STAGES) & 1)
        zeros = gl.zeros([HALF_M, BLOCK_N], gl.float32, layout=SCORES)
        scores = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        last_stage = (place - 1) % STAGES
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
        mbarrier.wait(v_full.index(last_stage), ((place - 1) // STAGES) & 1)
        acc = warpgroup_mma(operand, v_tiles.index(last_stage), acc, is_async=True)
        mbarrier.arrive(next_turn, count=1)
        scores = warpgroup_mma_wait(1, deps=[scores])
        _release(k_empty.index(stage))
        p, alpha, m_i, l_i = _online_softmax(
            scores, m_i, l_i, top_tile - i, positions, scale, MASK, WINDOW, CAP, BLOCK_N, SCORES
        )
        acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
        _release(v_empty.index(last_stage))
    return acc, m_i, l_i, p, alpha


@gluon.jit
def attend_item(
    q, start_m, context_len, count, top_tile, num_masked, num_whole, num_tiles, scale, k_tiles, v_tiles, k_full,
    k_empty, v_full, v_empty, my_turn, next_turn,
    FIRST: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr, GROUP: gl.constexpr, HALF_M: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """One warpgroup: HALF_M rows from `start_m` on, over `num_tiles` key tiles from `top_tile` downwards.

    Returns acc, in layout ACC, and m_i and l_i of each row, in layout SCORES.
    """
    positions = context_len + (start_m + gl.arange(0, HALF_M, layout=gl.SliceLayout(1, SCORES))) // GROUP
    m_i = gl.full([HALF_M], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    l_i = gl.zeros([HALF_M], gl.float32, layout=gl.SliceLayout(1, SCORES))
    acc = gl.zeros([HALF_M, HEAD_DIM], gl.float32, layout=ACC)

    mbarrier.wait(my_turn, (count & 1) ^ FIRST)
    mbarrier.wait(k_full.index(count % STAGES), (count // STAGES) & 1)
    zeros = gl.zeros([HALF_M, BLOCK_N], gl.float32, layout=SCORES)
    scores = warpgroup_mma(q, k_tiles.index(count % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.arrive(next_turn, count=1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    _release(k_empty.index(count % STAGES))
    p, alpha, m_i, l_i = _online_softmax(
        scores, m_i, l_i, top_tile, positions, scale, True, WINDOW, CAP, BLOCK_N, SCORES
    )
    acc, m_i, l_i, p, alpha = _main_loop(
        1, num_masked, count, top_tile, q, acc, m_i, l_i, p, alpha, positions, scale, k_tiles, v_tiles, k_full,
        k_empty, v_full, v_empty, my_turn, next_turn, FIRST, True, WINDOW, CAP, HALF_M, BLOCK_N, STAGES, SCORES, ACC,
    )  # fmt: skip
    acc, m_i, l_i, p, alpha = _main_loop(
        num_masked, num_whole, count, top_tile, q, acc, m_i, l_i, p, alpha, positions, scale, k_tiles, v_tiles, k_full,
        k_empty, v_full, v_empty, my_turn, next_turn, FIRST, False, WINDOW, CAP, HALF_M, BLOCK_N, STAGES, SCORES, ACC,
    )  # fmt: skip
    if WINDOW > 0:
        acc, m_i, l_i, p, alpha = _main_loop(
            num_whole, num_tiles, count, top_tile, q, acc, m_i, l_i, p, alpha, positions, scale, k_tiles, v_tiles,
            k_full, k_empty, v_full, v_empty, my_turn, next_turn, FIRST, True, WINDOW, CAP, HALF_M, BLOCK_N, STAGES,
            SCORES, ACC,
        )  # fmt: skip
    last = count + num_tiles - 1
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, ACC))[:, None]
    operand = _to_operand(p, q, ACC)
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    acc = warpgroup_mma(operand, v_tiles.index(last % STAGES), acc, is_async=True)
    acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
    _release(v_empty.index(last % STAGES))
    return acc, m_i, l_i
