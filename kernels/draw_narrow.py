"""Draws a token of one row whose limits keep few, for `draw_tokens`: device functions, one program a row.

Spans of tokens that can hold one that is kept are seen from their largest logits and their masses. Their tokens are
listed, and the exact threshold is found by bisection over the keys of the list.
"""

import triton
import triton.language as tl

from blockyard.kernels.draw_wide import key_of
from blockyard.kernels.philox_triton import gumbel_at


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
def gather(logits_ptr, spans_ptr, values_ptr, ids_ptr, num, least, vocab, SHIFT: tl.constexpr, SPAN: tl.constexpr,
            CHUNK: tl.constexpr, MOST: tl.constexpr):  # fmt: skip
    """Lists the tokens of `num` listed spans whose key is `least` or more, in order. How many there are."""
    count = 0
    for start in range(0, num, CHUNK):
        which = start + tl.arange(0, CHUNK)
        spans = tl.load(spans_ptr + which, mask=which < num, other=0)
        cols = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        there = (which < num)[:, None] & (cols < vocab)
        x = tl.load(logits_ptr + cols, mask=there, other=float("-inf")).to(tl.float32)
        taken = (there & (key_of(x, SHIFT) >= least)).to(tl.int32)
        each = tl.sum(taken, 1)
        places = count + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(taken, 1) - 1
        fits = (taken > 0) & (places < MOST)
        tl.store(values_ptr + places, x, mask=fits)
        tl.store(ids_ptr + places, cols, mask=fits)
        count += tl.sum(each, 0)
    return count


@triton.jit
def draw_narrow(
    logits_ptr,
    vocab,
    scale,
    top_k,
    top_p,
    min_p,
    least,
    spans,
    real,
    tops,
    top,
    masses,
    index,
    choice,
    key0,
    key1,
    spans_ptr,
    values_ptr,
    ids_ptr,
    SHIFT: tl.constexpr,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_SPANS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Value and token that win among what the limits keep, and whether these are too many: then neither is meant.

    spans, real, tops, masses [all spans]: their numbers, which there are, their largest logits and masses in
    exp((logit - top) * scale). `least` is the logit that min-p asks for. Lists: spans_ptr, values_ptr and ids_ptr.
    """
    best = tl.full([], 0.0, tl.float32)
    token = tl.full([], 0, tl.int32)
    wide = True
    keys = key_of(tops, SHIFT)
    highest, lowest = key_of(top, SHIFT), key_of(tl.full([], -3.4e38, tl.float32), SHIFT) - 1
    whole = tl.sum(masses, 0)
    plain = (top_k >= vocab) & (min_p <= 0)
    from_key = lowest + 1  # no token below it is kept
    if plain:  # a guess: other tokens of these spans weigh something too. Checked below
        from_key = bisect(keys, masses, whole * (top_p + 0.25 * (1 - top_p)), lowest, highest)
    if top_k < vocab:  # the k-th largest token is not below the k-th largest span
        from_key = bisect(keys, tl.where(real, 1.0, 0.0), top_k.to(tl.float32), lowest, highest)
    if min_p > 0:
        from_key = tl.maximum(from_key, key_of(least, SHIFT))
    near = (real & (keys >= from_key)).to(tl.int32)
    num = tl.sum(near, 0)
    if num <= MOST_SPANS:
        tl.store(spans_ptr + tl.cumsum(near, 0) - 1, spans, mask=near > 0)
        tl.debug_barrier()
        count = gather(logits_ptr, spans_ptr, values_ptr, ids_ptr, num, from_key, vocab, SHIFT, SPAN, CHUNK, MOST)
        tl.debug_barrier()
        if count <= MOST:
            places = tl.arange(0, MOST)
            there = places < count
            x = tl.load(values_ptr + places, mask=there, other=float("-inf"))
            ids = tl.load(ids_ptr + places, mask=there, other=0)
            keys = key_of(x, SHIFT)
            if top_k < vocab:
                kth = bisect(keys, tl.where(there, 1.0, 0.0), top_k.to(tl.float32), from_key - 1, highest)
                there = there & (keys >= kth)
            there = there & (x >= least)
            shares = tl.where(there, tl.exp((x - top) * scale), 0.0)
            left = tl.sum(shares, 0)
            whole = tl.where(plain, whole, left)
            wide = left < top_p * whole
            if top_p < 1.0:
                there = there & (keys >= bisect(keys, shares, top_p * whole, from_key - 1, highest))
            value = (x - top) * scale + gumbel_at(ids, index, choice, key0, key1)
            value = tl.where(there, value, float("-inf"))
            best = tl.max(value, 0)
            token = tl.min(tl.where(there & (value == best), ids, 0x7FFFFFFF), 0)
    return best, token, wide
