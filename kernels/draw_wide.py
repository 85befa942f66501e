"""Draws a token of one row whose limits keep many, for `draw_tokens`: device functions, one program a row.

The threshold is not looked for. The token with the largest noisy value is drawn among all that may be kept and the
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
def best_noisy(
    logits_ptr,
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
):
    """Of the tokens from `begin` to `end` whose key is above `low` and whose logit is `least` or more.

    Returns the largest (logit - top) * scale + noise, the lowest token that has it, and its key. The value is NaN
    where a logit is NaN or +inf, -inf where nothing is left. `begin` and TILE are multiples of 4.
    """
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    won = tl.full([], LOWEST, tl.int32)
    all_broken = begin < 0
    for start in range(begin, end, TILE):
        cols = start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + cols, mask=cols < end, other=float("-inf")).to(tl.float32)
        keys = key_of(x, SHIFT)
        noise = gumbel_run(start, index, choice, key0, key1, TILE)
        value = tl.where((keys > low) & (x >= least), (x - top) * scale + noise, float("-inf"))
        highest = tl.max(value, 0)
        first = tl.min(tl.where(value == highest, cols, 0x7FFFFFFF), 0)
        broken = tl.max(tl.where(x < float("inf"), 0, 1), 0) > 0
        better = highest > best
        token = tl.where(better, first, token)
        won = tl.where(better, tl.max(tl.where(cols == first, keys, LOWEST), 0), won)
        all_broken = all_broken | broken
        best = tl.maximum(best, highest)
    return tl.where(all_broken, float("nan"), best), token, won


@triton.jit
def weigh(logits_ptr, vocab, scale, low, least, top, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Mass, in exp((logit - top) * scale), and number of the tokens whose key is above `low`, logit `least` or more."""
    mass = tl.full([], 0.0, tl.float32)
    number = tl.full([], 0, tl.int32)
    for start in range(0, vocab, TILE):
        cols = start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        counted = (cols < vocab) & (key_of(x, SHIFT) > low) & (x >= least)
        mass += tl.sum(tl.where(counted, tl.exp((x - top) * scale), 0.0), 0)
        number += tl.sum(counted.to(tl.int32), 0)
    return mass, number


@triton.jit
def draw_wide(
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
):
    """The token that wins among what the limits keep, and its value; `least` is min-p's, `top` the row's largest."""
    low = tl.full([], LOWEST, tl.int32)
    if top_k < vocab:
        high = key_of(top, SHIFT)
        while low + 1 < high:  # as `bisect` in draw_tokens, over the whole row
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            _, number = weigh(logits_ptr, vocab, scale, middle, float("-inf"), top, SHIFT, TILE)
            less = number < top_k
            high = tl.where(less, middle, high)
            low = tl.where(less, low, middle)
    bound, _ = weigh(logits_ptr, vocab, scale, low, least, top, SHIFT, TILE)
    bound *= top_p
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    searching = True
    while searching:
        best, token, won = best_noisy(
            logits_ptr, 0, vocab, scale, low, least, top, index, choice, key0, key1, SHIFT, TILE
        )
        searching = False
        if top_p < 1.0:
            before, _ = weigh(logits_ptr, vocab, scale, won, least, top, SHIFT, TILE)
            searching = before >= bound
        low = won
    return best, token
