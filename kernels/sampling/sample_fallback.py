"""Draws a token of one row by one program, for `sample_tokens`: whatever the limits keep, and slowly.

For what is rare: top-k over a thousand, and rows for which the quicker ways know no winner.
"""

import triton
import triton.language as tl

from blockyard.kernels.sampling.philox_triton import gumbel_run
from blockyard.kernels.sampling.sample_common import key_of, tile_tokens, value_of, weight


@triton.jit
def _best_noisy(row_ptr, vocab, scale, least, top, noise, TILE: tl.constexpr, FAST: tl.constexpr):
    """The largest (logit - top) * scale + noise of the row's tokens of `least` or more, and the lowest that has it."""
    values = tl.full([TILE], float("-inf"), tl.float32)
    tokens = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    for tile in range(tl.cdiv(vocab, TILE)):
        cols = tile * TILE + tl.arange(0, TILE)
        x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        value = (x - top) * (scale * 0.6931471805599453) + gumbel_run(tile * TILE, noise, TILE, FAST)
        value = tl.where(x >= least, value, float("-inf"))
        tokens = tl.where(value > values, cols, tokens)
        values = tl.maximum(value, values)
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, tokens, 0x7FFFFFFF), 0)


@triton.jit
def _weigh(row_ptr, vocab, scale, least, reference, LANES: tl.constexpr, RUNS: tl.constexpr, FAST: tl.constexpr):
    """Mass against `reference`, and number, of the row's tokens whose logit is `least` or more."""
    mass = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.int32)
    for tile in range(tl.cdiv(vocab, LANES * RUNS * 8)):
        cols = tile_tokens(tile, LANES, RUNS)
        x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        mass += tl.sum(tl.sum(tl.where(x >= least, weight(x, scale, reference, FAST), 0.0), 2), 1)
        number += tl.sum(tl.sum((x >= least).to(tl.int32), 2), 1)
    return tl.sum(mass, 0), tl.sum(number, 0)


@triton.jit
def settle(row_ptr, vocab, scale, top_k, top_p, least, top, reference, whole, noise, SHIFT: tl.constexpr,
            LANES: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Value and token that win among what the limits keep, by one program: the draw from all tokens of `least` or more
    is repeated above each winner that top-p rules out, 1 + ln(1 / top_p) rounds on average."""
    if top_k < vocab:
        low, high = key_of(tl.full([], -3.4e38, tl.float32), SHIFT) - 1, key_of(top, SHIFT)
        while low + 1 < high:  # as `bisect` in draw_narrow, over the whole row
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            _, number = _weigh(row_ptr, vocab, scale, value_of(middle + 1, SHIFT), reference, LANES, RUNS, FAST)
            less = number < top_k
            high = tl.where(less, middle, high)
            low = tl.where(less, low, middle)
        least = tl.maximum(least, value_of(high, SHIFT))
    bound = top_p * whole
    if least > -3.4e38:
        left, _ = _weigh(row_ptr, vocab, scale, least, reference, LANES, RUNS, FAST)
        bound = top_p * left
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    searching = True
    while searching:
        best, token = _best_noisy(row_ptr, vocab, scale, least, top, noise, TILE, FAST)
        outside = False
        if top_p < 1.0:
            above = value_of(key_of(tl.load(row_ptr + token).to(tl.float32), SHIFT) + 1, SHIFT)
            before, _ = _weigh(row_ptr, vocab, scale, above, reference, LANES, RUNS, FAST)
            outside = before >= bound
            least = tl.where(outside, above, least)
        searching = outside
    return best, token
