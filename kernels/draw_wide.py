"""Draws a token of one row whose limits keep many, for `draw_tokens`: device functions.

The threshold is not looked for. The token with the largest noisy value is drawn among all that may be kept, and the
likelier ones are weighed: if they leave room for it, it would have won among the kept alone. If not, it and what is
no likelier is out, and the draw is repeated above it: 1 + ln(1 / top_p) rounds on average.
"""

import triton
import triton.language as tl

from blockyard.kernels.philox_triton import exp_of, gumbel_run


@triton.jit
def key_of(x, shift):
    """float32 -> int32 in the same order, without the `shift` lowest bits; equal values have equal keys."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> shift


@triton.jit
def value_of(key, shift):
    """The least float32 that has a key."""
    key = key << shift
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def least_kept(top, scale, min_p):
    """The logit that min-p asks for where `top` is the largest."""
    return tl.where(min_p > 0, top + tl.log(tl.where(min_p > 0, min_p, 1.0)) / scale, -3.4e38)


@triton.jit
def best_noisy(
    row_ptr,
    vocab,
    begin,
    end,
    scale,
    least,
    top,
    noise,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Of the tokens in tiles `begin` to `end` whose logit is `least` or more.

    Returns the largest (logit - top) * scale + noise and the lowest token that has it. The value is NaN where a logit
    is NaN or +inf, -inf where nothing is left.
    """
    values = tl.full([TILE], float("-inf"), tl.float32)
    tokens = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    broken = tl.zeros([TILE], tl.int32)
    for tile in tl.range(begin, end, num_stages=STAGES):
        cols = tile * TILE + tl.arange(0, TILE)
        x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        value = (x - top) * scale + gumbel_run(tile * TILE, noise, TILE, FAST)
        value = tl.where(x >= least, value, float("-inf"))
        broken = tl.where(x < float("inf"), broken, 1)
        tokens = tl.where(value > values, cols, tokens)
        values = tl.maximum(value, values)
    best = tl.max(values, 0)
    token = tl.min(tl.where(values == best, tokens, 0x7FFFFFFF), 0)
    return tl.where(tl.max(broken, 0) > 0, float("nan"), best), token


@triton.jit
def weigh(
    row_ptr,
    vocab,
    scale,
    least,
    top,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Mass, in exp((logit - top) * scale), and number of the row's tokens whose logit is `least` or more."""
    mass = tl.zeros([TILE], tl.float32)
    number = tl.zeros([TILE], tl.int32)
    for tile in tl.range(0, tl.cdiv(vocab, TILE), num_stages=STAGES):
        cols = tile * TILE + tl.arange(0, TILE)
        x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        mass += tl.where(x >= least, exp_of(x - top, scale, FAST), 0.0)
        number += (x >= least).to(tl.int32)
    return tl.sum(mass, 0), tl.sum(number, 0)


@triton.jit
def settle(
    best,
    token,
    row_ptr,
    vocab,
    scale,
    top_k,
    top_p,
    least,
    top,
    whole,
    noise,
    shift,
    TILE: tl.constexpr,
    WEIGHED: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """From what won among all tokens of `least` or more to what wins among those that top-k and top-p keep too.

    whole: the mass of the row.
    """
    if top_k < vocab:
        low, high = key_of(tl.full([], -3.4e38, tl.float32), shift) - 1, key_of(top, shift)
        while low + 1 < high:  # as `bisect` in draw_narrow, over the whole row
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            _, number = weigh(row_ptr, vocab, scale, value_of(middle + 1, shift), top, WEIGHED, STAGES, FAST)
            less = number < top_k
            high = tl.where(less, middle, high)
            low = tl.where(less, low, middle)
        least = tl.maximum(least, value_of(high, shift))
    bound = top_p * whole
    if least > -3.4e38:
        left, _ = weigh(row_ptr, vocab, scale, least, top, WEIGHED, STAGES, FAST)
        bound = top_p * left
    searching = True
    while searching:
        won = tl.load(row_ptr + token).to(tl.float32)
        outside = won < least
        if (won >= least) & (top_p < 1.0):
            above = value_of(key_of(won, shift) + 1, shift)
            before, _ = weigh(row_ptr, vocab, scale, above, top, WEIGHED, STAGES, FAST)
            outside = before >= bound
            least = tl.where(outside, above, least)
        if outside:
            best, token = best_noisy(
                row_ptr, vocab, 0, tl.cdiv(vocab, TILE), scale, least, top, noise, TILE, STAGES, FAST
            )
        searching = outside
    return best, token
