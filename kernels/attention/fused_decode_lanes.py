"""What a program of `fused_decode` does for its head, as device functions.

Its threads split the keys in ways that know nothing of each other until the end, so that nothing is handed from thread
to thread before that: of a tile [KEYS * WAYS, DIM] a way has every WAYS-th key, and as many threads side by side as
read a row of DIM elements at once.
"""

import triton
import triton.language as tl


@triton.jit
def turned(x, gain, cos, sin, eps, HEAD_DIM: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr):
    """A head in each row, normalised and rotated in pairs (2i, 2i + 1)."""
    if NORM:
        x = x * tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None] * gain.to(tl.float32)
    if ROTATE:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        x = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), x.shape)
    return x


@triton.jit
def load_tile(
    start, stop, table_ptr, layer_ptr, head, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keys and values from start on, below stop, [TILE, DIM] each."""
    dims = tl.arange(0, DIM)
    keys = start + tl.arange(0, TILE)
    inside = (keys < stop)[:, None] & (dims < HEAD_DIM)[None, :]
    blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < stop, other=0).to(tl.int64)
    lines = (blocks * (2 * KV_HEADS) + head) * BLOCK_SIZE + keys % BLOCK_SIZE
    places = layer_ptr + lines[:, None] * HEAD_DIM + dims[None, :]
    k = tl.load(places, mask=inside, other=0.0)
    v = tl.load(places + KV_HEADS * BLOCK_SIZE * HEAD_DIM, mask=inside, other=0.0)
    return k, v


@triton.jit
def capped(scores, scale, CAP: tl.constexpr):
    """In powers of two."""
    if CAP > 0:
        return (2 * tl.sigmoid(scores * (2 * scale / CAP)) - 1) * (CAP * 1.4426950408889634)
    return scores * scale


@triton.jit
def fold(
    q, k, v, known, scale, total, mass, top, KEYS: tl.constexpr, WAYS: tl.constexpr, DIM: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Takes a tile into the sum of values, the sum of shares and the largest score, each kept apart a way."""
    k = tl.reshape(k.to(tl.float32), [KEYS, WAYS, DIM])
    v = tl.reshape(v.to(tl.float32), [KEYS, WAYS, DIM])
    scores = capped(tl.sum(k * q[None, :, :], 2), scale, CAP)
    scores = tl.where(tl.reshape(known, [KEYS, WAYS]), scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 0))
    floor = tl.maximum(higher, -3e38)  # as long as nothing was seen
    shares = tl.exp2(scores - floor[None, :])
    fade = tl.exp2(top - floor)
    total = total * fade[:, None] + tl.sum(shares[:, :, None] * v, 0)
    return total, mass * fade + tl.sum(shares, 0), higher


@triton.jit
def combine(
    out_ptr, partial_ptr, weight_ptr, parts, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MOST: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """A head from its parts, MOST at most."""
    part, dims = tl.arange(0, MOST), tl.arange(0, DIM)
    weights = tl.load(weight_ptr + part, mask=part < parts, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(weights, 0)
    mass = tl.sum(tl.exp2(weights - top), 0)
    total = tl.zeros([DIM], tl.float32)
    for start in range(0, parts, PARTS):
        some = start + tl.arange(0, PARTS)
        weight = tl.load(weight_ptr + some, mask=some < parts, other=float("-inf"), cache_modifier=".cg")
        inside = (some < parts)[:, None] & (dims < HEAD_DIM)[None, :]
        places = partial_ptr + some[:, None] * HEAD_DIM + dims[None, :]
        values = tl.load(places, mask=inside, other=0.0, cache_modifier=".cg")
        total += tl.sum(values * tl.exp2(weight - top)[:, None], 0)
    tl.store(out_ptr + dims, total / mass, mask=dims < HEAD_DIM)


@triton.jit
def keys_of_part(position, part, most, WINDOW: tl.constexpr, LEAST: tl.constexpr):
    """The keys of a part, all older than the new one, and the parts that there are, `most` of them at most."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0)
    keys = position - first
    parts = tl.minimum(tl.maximum(tl.cdiv(keys, LEAST), 1), most)
    each = tl.cdiv(tl.cdiv(keys, parts), 16) * 16
    begin = first + part * each
    return begin, tl.minimum(begin + each, position), tl.maximum(tl.cdiv(keys, tl.maximum(each, 1)), 1)


@triton.jit
def stored(x, scale, dtype: tl.constexpr, FP8_MAX: tl.constexpr):
    """As the pool has it."""
    if FP8_MAX > 0:
        x = tl.minimum(tl.maximum(x / scale, -FP8_MAX), FP8_MAX)
    return x.to(dtype)


@triton.jit
def write_new(
    table, layer_ptr, head, position, k, v, mask, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The new key and value of a head, in the rows of k and v that the mask has."""
    block = tl.load(table + position // BLOCK_SIZE).to(tl.int64)
    line = ((block * (2 * KV_HEADS) + head) * BLOCK_SIZE + position % BLOCK_SIZE) * HEAD_DIM
    places = layer_ptr + line + tl.broadcast_to(tl.arange(0, k.shape[1])[None, :], k.shape)
    tl.store(places, k, mask=mask)
    tl.store(places + KV_HEADS * BLOCK_SIZE * HEAD_DIM, v, mask=mask)


@triton.jit
def load_head(ptr, head, dims, inside, HEAD_DIM: tl.constexpr, WAYS: tl.constexpr, DIM: tl.constexpr):
    """[WAYS, DIM], in each row the same: a thread loads what it needs of it, and no other hands it over."""
    return tl.load(tl.broadcast_to(ptr + head * HEAD_DIM + dims[None, :], [WAYS, DIM]), mask=inside, other=0.0)


@triton.jit
def arrive(
    mine, parts, out_ptr, partial_ptr, weight_ptr, counts_ptr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    MOST: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A part is done; who says so last puts them together."""
    tl.debug_barrier()  # all of this program's stores before the word that they are there
    if tl.atomic_add(counts_ptr + mine, 1, sem="acq_rel", scope="gpu") == parts - 1:
        tl.debug_barrier()
        first = mine * tl.num_programs(0)
        combine(
            out_ptr + mine * HEAD_DIM, partial_ptr + first * HEAD_DIM, weight_ptr + first, parts, HEAD_DIM, DIM, MOST,
            PARTS,
        )  # fmt: skip
        tl.store(counts_ptr + mine, 0)
