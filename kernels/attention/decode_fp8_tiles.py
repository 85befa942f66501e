"""Device functions of `paged_decode_fp8`, in Gluon: each warp attends to keys of its own, in registers alone.

The tensor cores' instruction m16n8k16 wants keys, and dims of values, as its 16 rows, and query heads as its 8 columns.
A thread loads 16 adjacent numbers of a key, or of a value, straight into the registers of the instruction: the order of
the dims in a sum is free, and so is the order of the dims of the output until it is stored. So no number of the cache
goes through shared memory, and no warp waits for another before the end of a split.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

LOG2E = gl.constexpr(1.4426950408889634)
# p is up to 2**15, in float16's range: what is 2**-39 of the largest is still not 0
P_BITS = gl.constexpr(15.0)
NO_SCORE = gl.constexpr(-3e38)  # below all scores, but finite


@gluon.jit
def _load_queries(
    q_ptr, head, GROUP: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """Query heads of a K/V head in float16, [WARPS, DIM, HEADS], the same for each warp, and factors of their scores.

    The factors, [WARPS, HEADS], are powers of two: each head is scaled into the range of float16.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 16)
    dims = gl.arange(0, DIM, layout=gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))[None, :][:, :, None]
    group = gl.arange(0, HEADS, layout=gl.SliceLayout(0, gl.SliceLayout(1, OPERAND)))[None, :][:, None, :]
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, OPERAND)))[:, None][:, :, None]
    q = gl.load(q_ptr + (head * GROUP + group) * DIM + dims + warp * 0, mask=(group < GROUP) & (warp >= 0), other=0.0)
    if q.dtype == gl.float16:
        return q, gl.full([WARPS, HEADS], 1.0, gl.float32, layout=gl.SliceLayout(1, MMA))
    q = q.to(gl.float32)
    # the largest number of a head gets the exponent 14; what becomes subnormal is 2**-28 of it
    exponent = gl.max(gl.abs(q), 1).to(gl.int32, bitcast=True) >> 23
    shift = gl.minimum(268 - exponent, 253)
    q = q * (shift << 23).to(gl.float32, bitcast=True)[:, None, :]
    unscale = ((254 - shift) << 23).to(gl.float32, bitcast=True)
    return q.to(gl.float16), gl.convert_layout(unscale, gl.SliceLayout(1, MMA))


@gluon.jit
def _find_blocks(
    start, begin, stop, table_ptr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """KV blocks of the keys from `start` on, [WARPS, KEYS], or [WARPS, 1] where those of a warp are in one block."""
    keys = start + gl.arange(0, WARPS, layout=gl.SliceLayout(1, LAYOUT))[:, None] * KEYS
    if BLOCK_SIZE % KEYS == 0:  # tiles begin at multiples of KEYS
        valid = (keys + KEYS > begin) & (keys < stop)
    else:
        keys += gl.arange(0, KEYS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
        valid = (keys >= begin) & (keys < stop)
    return gl.load(table_ptr + keys // BLOCK_SIZE, mask=valid, other=0)


@gluon.jit
def _load_tile(
    blocks, start, begin, stop, layer_ptr, head, IS_V: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Keys, or values, from `start` on: [WARPS, KEYS, DIM // 4] words of 4 numbers; 0 where the split has no key.

    blocks: of `_find_blocks`.
    """
    ROWS: gl.constexpr = gl.SliceLayout(2, WORDS)
    keys = start + gl.arange(0, WARPS, layout=gl.SliceLayout(1, ROWS))[:, None] * KEYS
    keys += gl.arange(0, KEYS, layout=gl.SliceLayout(0, ROWS))[None, :]
    part = blocks.to(gl.int64) * (2 * KV_HEADS) + (head + KV_HEADS if IS_V else head)
    rows = part * BLOCK_SIZE + keys % BLOCK_SIZE
    words = gl.arange(0, DIM // 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))[None, :][:, None, :]
    places = layer_ptr.to(gl.pointer_type(gl.int32)) + rows[:, :, None] * (DIM // 4) + words
    return gl.load(places, mask=((keys >= begin) & (keys < stop))[:, :, None], other=0)


@gluon.jit
def _to_float16(words, KIND: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, WARPS: gl.constexpr):
    """The numbers of words, [WARPS, KEYS, DIM]. KIND: e4m3 or e5m2; float16 has each of them."""
    HALVES: gl.constexpr = gl.constexpr(
        "{.reg .b16 a, b; .reg .b32 c, d; mov.b32 {a, b}, $4; cvt.rn.f16x2." + KIND + "x2 c, a; cvt.rn.f16x2." + KIND
        + "x2 d, b; mov.b32 {$0, $1}, c; mov.b32 {$2, $3}, d;}"
    )  # fmt: skip
    a, b, c, d = gl.inline_asm_elementwise(
        HALVES, "=h,=h,=h,=h,r", [words], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=1
    )
    return gl.reshape(gl.join(gl.join(a, c), gl.join(b, d)), [WARPS, KEYS, DIM])


@gluon.jit
def _transposed(p, KEYS: gl.constexpr, HEADS: gl.constexpr, WARPS: gl.constexpr, MMA: gl.constexpr):
    """p [WARPS, KEYS, HEADS] in float16 as a right operand: blocks of 8 x 8 are transposed among the threads."""
    p = gl.inline_asm_elementwise(
        "{.reg .b32 pair; cvt.rn.f16x2.f32 pair, $2, $1; movmatrix.sync.aligned.m8n8.trans.b16 $0, pair;}", "=r,r,r",
        [p], dtype=gl.float16, is_pure=False, pack=2,
    )  # fmt: skip
    # now of a block of keys and heads the rows are heads, and the columns keys
    p = gl.permute(gl.reshape(p, [WARPS, KEYS // 8, 8, HEADS // 8, 8]), [0, 1, 4, 3, 2])
    p = gl.reshape(p, [WARPS, KEYS, HEADS])
    return gl.convert_layout(p, gl.DotOperandLayout(1, MMA, 2), assert_trivial=True)


@gluon.jit
def _attend_tile(
    q, k, v, start, begin, stop, scale, acc, l_i, m_i,
    KIND: gl.constexpr, CAP: gl.constexpr, KEYS: gl.constexpr, HEADS: gl.constexpr, DIM: gl.constexpr,
    WARPS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Online softmax of a tile of words: acc [WARPS, DIM, HEADS], l_i [WARPS, KEYS, HEADS] and m_i [WARPS, HEADS].

    Each warp has its own. m_i is the maximum less P_BITS; scores are in powers of two.
    """
    k = gl.convert_layout(
        _to_float16(k, KIND, KEYS, DIM, WARPS), gl.DotOperandLayout(0, MMA, 16), assert_trivial=True
    )  # fmt: skip
    scores = mma_v2(k, q, gl.zeros([WARPS, KEYS, HEADS], gl.float32, layout=MMA))
    if CAP > 0:  # the scale does not include log2(e)
        scores = CAP * LOG2E - 2 * CAP * LOG2E / (1 + gl.exp2(scores * (scale * (2 / CAP * LOG2E))[:, None, :]))
    else:
        scores = scores * scale[:, None, :]
    SLICE: gl.constexpr = gl.SliceLayout(2, MMA)
    keys = start + gl.arange(0, WARPS, layout=gl.SliceLayout(1, SLICE))[:, None] * KEYS
    keys += gl.arange(0, KEYS, layout=gl.SliceLayout(0, SLICE))[None, :]
    scores = gl.where(((keys >= begin) & (keys < stop))[:, :, None], scores, float("-inf"))
    m_new = gl.maximum(m_i, gl.max(scores, 1) - P_BITS)
    p = gl.exp2(scores - m_new[:, None, :])
    alpha = gl.exp2(m_i - m_new)[:, None, :]
    # rows of the product: dim % (DIM // 8) * 8 + dim // (DIM // 8), so that a thread has adjacent dims of `v`
    v = gl.permute(gl.reshape(_to_float16(v, KIND, KEYS, DIM, WARPS), [WARPS, KEYS, 8, DIM // 8]), [0, 3, 2, 1])
    v = gl.convert_layout(gl.reshape(v, [WARPS, DIM, KEYS]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True)
    acc = mma_v2(v, _transposed(p, KEYS, HEADS, WARPS, MMA), acc * alpha)
    return acc, l_i * alpha + p, m_new


@gluon.jit
def attend_split(
    q_ptr, begin, stop, table_ptr, layer_ptr, head, scale,
    KIND: gl.constexpr, CAP: gl.constexpr, GROUP: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, WARPS: gl.constexpr, AHEAD: gl.constexpr,
    K_WORDS: gl.constexpr, V_WORDS: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Attention over the keys from `begin` to `stop`: acc, l_i and m_i of each warp, as `_attend_tile` has them.

    AHEAD: a tile is loaded before the one in front of it is used. Block tables are read one tile earlier in any case.
    """
    K_ROWS: gl.constexpr = gl.SliceLayout(2, K_WORDS)
    V_ROWS: gl.constexpr = gl.SliceLayout(2, V_WORDS)
    TILE: gl.constexpr = WARPS * KEYS
    LEAD: gl.constexpr = TILE if AHEAD else 0
    first = begin // KEYS * KEYS
    k_blocks = _find_blocks(first, begin, stop, table_ptr, BLOCK_SIZE, KEYS, WARPS, K_ROWS)
    v_blocks = _find_blocks(first, begin, stop, table_ptr, BLOCK_SIZE, KEYS, WARPS, V_ROWS)
    if AHEAD:
        k = _load_tile(
            k_blocks, first, begin, stop, layer_ptr, head, False, KV_HEADS, DIM, BLOCK_SIZE, KEYS, WARPS, K_WORDS
        )
        v = _load_tile(
            v_blocks, first, begin, stop, layer_ptr, head, True, KV_HEADS, DIM, BLOCK_SIZE, KEYS, WARPS, V_WORDS
        )
        k_blocks = _find_blocks(first + TILE, begin, stop, table_ptr, BLOCK_SIZE, KEYS, WARPS, K_ROWS)
        v_blocks = _find_blocks(first + TILE, begin, stop, table_ptr, BLOCK_SIZE, KEYS, WARPS, V_ROWS)
    q, unscale = _load_queries(q_ptr, head, GROUP, HEADS, DIM, WARPS, MMA)
    scale = unscale * scale
    m_i = gl.full([WARPS, HEADS], NO_SCORE, gl.float32, layout=gl.SliceLayout(1, MMA))
    l_i = gl.zeros([WARPS, KEYS, HEADS], gl.float32, layout=MMA)
    acc = gl.zeros([WARPS, DIM, HEADS], gl.float32, layout=MMA)
    for start in range(first, stop, TILE):
        ahead = start + LEAD
        k_next = _load_tile(
            k_blocks, ahead, begin, stop, layer_ptr, head, False, KV_HEADS, DIM, BLOCK_SIZE, KEYS, WARPS, K_WORDS
        )
        v_next = _load_tile(
            v_blocks, ahead, begin, stop, layer_ptr, head, True, KV_HEADS, DIM, BLOCK_SIZE, KEYS, WARPS, V_WORDS
        )
        k_blocks = _find_blocks(ahead + TILE, begin, stop, table_ptr, BLOCK_SIZE, KEYS, WARPS, K_ROWS)
        v_blocks = _find_blocks(ahead + TILE, begin, stop, table_ptr, BLOCK_SIZE, KEYS, WARPS, V_ROWS)
        if not AHEAD:
            k, v = k_next, v_next
        acc, l_i, m_i = _attend_tile(
            q, k, v, start, begin, stop, scale, acc, l_i, m_i, KIND, CAP, KEYS, HEADS, DIM, WARPS, MMA
        )
        k, v = k_next, v_next
    return acc, l_i, m_i
