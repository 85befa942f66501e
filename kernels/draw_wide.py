"""Draws a token of one row whose limits keep many, for `draw_tokens`: device functions.

The threshold is not looked for. The token with the largest noisy value is drawn among all that may be kept, and the
likelier ones are weighed: if they leave room for it, it would have won among the kept alone. If not, it and what is
no likelier is out, and the draw is repeated above it: 1 + ln(1 / top_p) rounds on average.
"""

import triton
import triton.language as tl

from blockyard.kernels.philox_triton import gumbel_run

LOWEST = tl.constexpr(-0x80000000)  # below every key


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """float32 -> int32 in the same order, without the SHIFT lowest bits; equal values have equal keys."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def least_kept(top, scale, min_p):
    """The logit that min-p asks for where `top` is the largest."""
    return tl.where(min_p > 0, top + tl.log(tl.where(min_p > 0, min_p, 1.0)) / scale, float("-inf"))


@triton.jit
def best_noisy(
    logits_ptr,
    vocab,
    begin,
    end,
    scale,
    low,
    least,
    top,
    index,
    choice,
    key0,
    key1,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Of the tokens in tiles `begin` to `end` whose key is above `low` and whose logit is `least` or more.

    Returns the largest (logit - top) * scale + noise and the lowest token that has it. The value is NaN where a logit
    is NaN or +inf, -inf where nothing is left.
    """
    values = tl.full([TILE], float("-inf"), tl.float32)
    tokens = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    broken = tl.zeros([TILE], tl.int32)
    for tile in range(begin, end):
        cols = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        noise = gumbel_run(tile * TILE, index, choice, key0, key1, TILE, FAST)
        allowed = (key_of(x, SHIFT) > low) & (x >= least)
        value = tl.where(allowed, (x - top) * scale + noise, float("-inf"))
        broken = tl.where(x < float("inf"), broken, 1)
        tokens = tl.where(value > values, cols, tokens)
        values = tl.maximum(value, values)
    best = tl.max(values, 0)
    token = tl.min(tl.where(values == best, tokens, 0x7FFFFFFF), 0)
    return tl.where(tl.max(broken, 0) > 0, float("nan"), best), token


@triton.jit
def weigh(logits_ptr, vocab, scale, low, least, top, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Mass, in exp((logit - top) * scale), and number of the tokens whose key is above `low`, logit `least` or more."""
    mass = tl.zeros([TILE], tl.float32)
    number = tl.zeros([TILE], tl.int32)
    for start in range(0, vocab, TILE):
        cols = start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        counted = (cols < vocab) & (key_of(x, SHIFT) > low) & (x >= least)
        mass += tl.where(counted, tl.exp((x - top) * scale), 0.0)
        number += counted.to(tl.int32)
    return tl.sum(mass, 0), tl.sum(number, 0)


@triton.jit
def kth_key(logits_ptr, vocab, top_k, top, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """A key that the k-th largest logit of the row has, less 1; LOWEST where the row has no more than k."""
    low = tl.full([], LOWEST, tl.int32)
    if top_k < vocab:
        high = key_of(top, SHIFT)
        while low + 1 < high:  # as `bisect` in draw_narrow, over the whole row
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            _, number = weigh(logits_ptr, vocab, 1.0, middle, float("-inf"), top, SHIFT, TILE)
            less = number < top_k
            high = tl.where(less, middle, high)
            low = tl.where(less, low, middle)
    return low


@triton.jit
def settle(
    best,
    token,
    logits_ptr,
    vocab,
    scale,
    top_k,
    top_p,
    least,
    top,
    index,
    choice,
    key0,
    key1,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    FAST: tl.constexpr,
):
    """From what won among all tokens of `least` or more to what wins among those that top-k and top-p keep too."""
    low = kth_key(logits_ptr, vocab, top_k, top, SHIFT, TILE)
    won = key_of(tl.load(logits_ptr + token).to(tl.float32), SHIFT)
    bound = top_p
    if top_p < 1.0:
        whole, _ = weigh(logits_ptr, vocab, scale, low, least, top, SHIFT, TILE)
        bound = top_p * whole
    searching = True
    while searching:
        outside = won <= low
        if (won > low) & (top_p < 1.0):
            before, _ = weigh(logits_ptr, vocab, scale, won, least, top, SHIFT, TILE)
            outside = before >= bound
            low = tl.where(outside, won, low)
        if outside:
            best, token = best_noisy(
                logits_ptr, vocab, 0, tl.cdiv(vocab, TILE), scale, low, least, top, index, choice, key0, key1,
                SHIFT, TILE, FAST,
            )  # fmt: skip
            won = key_of(tl.load(logits_ptr + token).to(tl.float32), SHIFT)
        searching = outside
    return best, token
