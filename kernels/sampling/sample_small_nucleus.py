"""Draws a token of one row whose limits keep few, for `sample_tokens`: device functions, one program a row.

Spans of tokens that can hold one that is kept are seen from their largest logits. Their tokens are listed, and the
exact threshold is found by bisection over the keys of the list.
"""

import triton
import triton.language as tl

from blockyard.kernels.sampling.philox_triton import gumbel_at
from blockyard.kernels.sampling.sample_common import key_of, span_tokens, weight


@triton.jit
def bisect(keys, weights, target, low, high):
    """The least t above `low` for which the weights of keys above t are less than `target`; `high` is such a t."""
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        less = tl.sum(tl.where(keys > middle, weights, 0.0), 0) < target
        high = tl.where(less, middle, high)
        low = tl.where(less, low, middle)
    return high


@triton.jit
def reach_down(values, weights, goal, low, high, STEPS: tl.constexpr):
    """A value between `low` and `high`, as large as few steps find it, at or above which lies the weight `goal`.

    `low` where even that is too high.
    """
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        enough = tl.sum(tl.where(values >= middle, weights, 0.0), 0) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def lowest_kept(tops, real, top, reference, whole, scale, top_k, top_p, least, vocab, STEPS: tl.constexpr,
                FAST: tl.constexpr):  # fmt: skip
    """A logit below which the limits keep no token. tops [spans] are tokens too, of other spans each."""
    bound = tl.maximum(tl.full([], -3.4e38, tl.float32), least)
    if (top_p < 1.0) & (top_k >= vocab) & (least <= -3.4e38):  # else a share of what is not known yet
        # what is lower weighs less than 1 - top_p of the largest alone
        low = top - (tl.log2(vocab.to(tl.float32)) - tl.log2(tl.maximum(1 - top_p, 1e-7))) / scale
        weights = tl.where(real, weight(tops, scale, reference, FAST), 0.0)
        bound = tl.maximum(reach_down(tops, weights, top_p * whole, low, top, STEPS), bound)
    if top_k < vocab:  # the k-th largest token is not below the k-th largest span
        wanted, ones = top_k.to(tl.float32), tl.where(real, 1.0, 0.0)
        low = tl.maximum(tl.min(tl.where(real, tops, top), 0), top - 100)
        if tl.sum(tl.where(tops >= low, ones, 0.0), 0) >= wanted:
            bound = tl.maximum(reach_down(tops, ones, wanted, low, top, STEPS), bound)
    return bound


@triton.jit
def list_spans(spans_ptr, near, numbers, MOST_SPANS: tl.constexpr):
    """Lists the spans that are near, in order, MOST_SPANS at most; how many are."""
    ones = near.to(tl.int32)
    places = tl.cumsum(ones, 0) - 1
    tl.debug_barrier()  # an earlier list has been read
    tl.store(spans_ptr + places, numbers, mask=near & (places < MOST_SPANS))
    tl.debug_barrier()
    return tl.sum(ones, 0)


@triton.jit
def read_spans(row_ptr, spans_ptr, start, num, vocab, LANES: tl.constexpr, RUNS: tl.constexpr, CHUNK: tl.constexpr):
    """Of the listed spans from `start` on: which tokens there are, their ids and logits, [CHUNK, RUNS * 8] each."""
    which = start + tl.arange(0, CHUNK)
    ids = span_tokens(tl.load(spans_ptr + which, mask=which < num, other=0), LANES, RUNS)
    there = (which < num)[:, None] & (ids < vocab)
    return there, ids, tl.load(row_ptr + ids, mask=there, other=float("-inf")).to(tl.float32)


@triton.jit
def gather(
    row_ptr,
    spans_ptr,
    values_ptr,
    ids_ptr,
    num,
    bound,
    vocab,
    LANES: tl.constexpr,
    RUNS: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
):
    """Lists the tokens of `num` listed spans whose logit is `bound` or more: how many there are, MOST are listed."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, num, CHUNK):
        there, cols, x = read_spans(row_ptr, spans_ptr, start, num, vocab, LANES, RUNS, CHUNK)
        taken = there & (x >= bound)
        ones = taken.to(tl.int32)
        each = tl.sum(ones, 1)
        places = count + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(ones, 1) - 1
        fits = taken & (places < MOST)
        tl.store(values_ptr + places, x, mask=fits)
        tl.store(ids_ptr + places, cols, mask=fits)
        count += tl.sum(each, 0)
    return count


@triton.jit
def read_list(values_ptr, ids_ptr, count, MOST: tl.constexpr):
    """The same of listed tokens, [MOST] each."""
    places = tl.arange(0, MOST)
    there = places < count
    x = tl.load(values_ptr + places, mask=there, other=float("-inf"))
    return there, tl.load(ids_ptr + places, mask=there, other=0), x


@triton.jit
def draw_among(
    there,
    ids,
    x,
    bound,
    top,
    reference,
    whole,
    scale,
    top_k,
    top_p,
    plain,
    vocab,
    noise,
    shift,
    FAST: tl.constexpr,
):
    """Value and token that win among what the limits keep of these tokens, which have all of `bound` or more.

    plain: top-p alone limits. whole: the row's mass, in weights against `reference`.
    """
    there = there & (x >= bound)
    keys = key_of(x, shift)
    low, high = key_of(bound, shift) - 1, key_of(top, shift)
    if top_k < vocab:
        kth = bisect(keys, tl.where(there, 1.0, 0.0), top_k.to(tl.float32), low, high)
        there = there & (keys >= kth)
    if top_p < 1.0:
        shares = tl.where(there, weight(x, scale, reference, FAST), 0.0)
        kept = top_p * tl.where(plain, whole, tl.sum(shares, 0))
        there = there & (keys >= bisect(keys, shares, kept, low, high))
    value = (x - top) * (scale * 0.6931471805599453) + gumbel_at(ids, noise, FAST)
    value = tl.where(there, value, float("-inf"))
    best = tl.max(value, 0)
    return best, tl.min(tl.where(there & (value == best), ids, 0x7FFFFFFF), 0)
