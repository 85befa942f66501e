"""Draws a token of one row whose limits keep few, for `draw_tokens`: device functions, one program a row.

Spans of tokens that can hold one that is kept are seen from their largest logits and their masses. Their tokens are
listed, and the exact threshold is found by bisection over the keys of the list.
"""

import triton
import triton.language as tl

from blockyard.kernels.draw_wide import key_of, least_kept
from blockyard.kernels.philox_triton import exp_of, gumbel_at


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
    for _ in tl.static_range(STEPS):
        middle = 0.5 * (low + high)
        enough = tl.sum(tl.where(values >= middle, weights, 0.0), 0) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def first_guess(tops, real, top, masses, scale, top_k, top_p, least, vocab, plain, goal):
    """A logit below which no token is kept; where top-p alone limits, a guess that other tokens have to confirm."""
    bound = tl.full([], -3.4e38, tl.float32)
    if plain:  # what is lower weighs less than 1 - top_p of the largest alone
        low = top - (tl.log(vocab.to(tl.float32)) - tl.log(tl.maximum(1 - top_p, 1e-7))) / scale
        bound = tl.maximum(reach_down(tops, masses, goal, low, top, 8), bound)
    if top_k < vocab:  # the k-th largest token is not below the k-th largest span
        wanted, ones = top_k.to(tl.float32), tl.where(real, 1.0, 0.0)
        low = tl.maximum(tl.min(tl.where(real, tops, top), 0), top - 100)
        if tl.sum(tl.where(tops >= low, ones, 0.0), 0) >= wanted:
            bound = reach_down(tops, ones, wanted, low, top, 8)
    return tl.maximum(bound, least)


@triton.jit
def gather(
    row_ptr,
    spans_ptr,
    values_ptr,
    ids_ptr,
    num,
    bound,
    scale,
    top,
    vocab,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST: tl.constexpr,
    FAST: tl.constexpr,
):
    """Lists the tokens of `num` listed spans whose logit is `bound` or more, in order: their number and their mass."""
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0.0, tl.float32)
    for start in range(0, num, CHUNK):
        which = start + tl.arange(0, CHUNK)
        spans = tl.load(spans_ptr + which, mask=which < num, other=0)
        cols = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        there = (which < num)[:, None] & (cols < vocab)
        x = tl.load(row_ptr + cols, mask=there, other=float("-inf")).to(tl.float32)
        taken = there & (x >= bound)
        mass += tl.sum(tl.sum(tl.where(taken, exp_of(x - top, scale, FAST), 0.0), 1), 0)
        ones = taken.to(tl.int32)
        each = tl.sum(ones, 1)
        places = count + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(ones, 1) - 1
        fits = taken & (places < MOST)
        tl.store(values_ptr + places, x, mask=fits)
        tl.store(ids_ptr + places, cols, mask=fits)
        count += tl.sum(each, 0)
    return count, mass


@triton.jit
def draw_narrow(
    row_ptr,
    vocab,
    scale,
    top_k,
    top_p,
    min_p,
    spans,
    real,
    tops,
    top,
    masses,
    whole,
    noise,
    lists,
    shift,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_SPANS: tl.constexpr,
    MOST: tl.constexpr,
    FAST: tl.constexpr,
):
    """Value and token that win among what the limits keep, and whether these are too many: then neither is meant.

    spans, real, tops, masses [all spans]: their numbers, which there are, their largest logits and masses in
    exp((logit - top) * scale). whole: the sum of these. lists: where spans, logits and ids are listed.
    """
    spans_ptr, values_ptr, ids_ptr = lists
    least = least_kept(top, scale, min_p)
    best = tl.full([], 0.0, tl.float32)
    token = tl.full([], 0, tl.int32)
    count = tl.full([], MOST + 1, tl.int32)
    bound = tl.full([], 0.0, tl.float32)
    plain = (top_k >= vocab) & (min_p <= 0)
    goal = whole * (top_p + 0.5 * (1 - top_p))  # more than is kept: it counts tokens of these spans that are not
    tries = 0
    while tries < 3:
        tries += 1
        bound = first_guess(tops, real, top, masses, scale, top_k, top_p, least, vocab, plain, goal)
        near = (real & (tops >= bound)).to(tl.int32)
        num = tl.sum(near, 0)
        count = tl.full([], MOST + 1, tl.int32)
        if num <= MOST_SPANS:
            tl.store(spans_ptr + tl.cumsum(near, 0) - 1, spans, mask=near > 0)
            tl.debug_barrier()
            count, found = gather(
                row_ptr, spans_ptr, values_ptr, ids_ptr, num, bound, scale, top, vocab, SPAN, CHUNK, MOST, FAST
            )
            tl.debug_barrier()
            lacking = top_p * whole - found
            if plain & (lacking > 0):
                goal = tl.minimum(goal + 1.5 * lacking, whole)
                count = tl.full([], MOST + 1, tl.int32)
            else:
                tries = 3
        else:
            tries = 3
    if count <= MOST:
        places = tl.arange(0, MOST)
        there = places < count
        x = tl.load(values_ptr + places, mask=there, other=float("-inf"))
        ids = tl.load(ids_ptr + places, mask=there, other=0)
        keys = key_of(x, shift)
        low, high = key_of(bound, shift) - 1, key_of(top, shift)
        if top_k < vocab:
            kth = bisect(keys, tl.where(there, 1.0, 0.0), top_k.to(tl.float32), low, high)
            there = there & (keys >= kth)
        shares = tl.where(there, exp_of(x - top, scale, FAST), 0.0)
        if top_p < 1.0:
            kept = top_p * tl.where(plain, whole, tl.sum(shares, 0))
            there = there & (keys >= bisect(keys, shares, kept, low, high))
        value = (x - top) * scale + gumbel_at(ids, noise, FAST)
        value = tl.where(there, value, float("-inf"))
        best = tl.max(value, 0)
        token = tl.min(tl.where(there & (value == best), ids, 0x7FFFFFFF), 0)
    return best, token, count > MOST
