"""Samples one row by one program, for `sample_tokens`: correct for any limits, and slow.

It serves rare rows: top-k above a thousand, and rows for which the faster kernels find no certain winner.
"""

import triton
import triton.language as tl

from blockyard.kernels.sampling.philox_triton import gumbel_run
from blockyard.kernels.sampling.sample_common import from_ordered_int, softmax_weight, tile_tokens, to_ordered_int


@triton.jit
def _best_noisy(row_ptr, vocab, scale, min_logit, max_logit, noise, TILE: tl.constexpr, FAST: tl.constexpr):
    """The largest (logit - max_logit) * scale + noise among tokens of at least `min_logit`, and the lowest token that
    has it.
    """
    values = tl.full([TILE], float("-inf"), tl.float32)
    tokens = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    for tile in range(tl.cdiv(vocab, TILE)):
        cols = tile * TILE + tl.arange(0, TILE)
        x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        value = (x - max_logit) * (scale * 0.6931471805599453) + gumbel_run(tile * TILE, noise, TILE, FAST)
        value = tl.where(x >= min_logit, value, float("-inf"))
        tokens = tl.where(value > values, cols, tokens)
        values = tl.maximum(value, values)
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, tokens, 0x7FFFFFFF), 0)


@triton.jit
def _weigh_above(
    row_ptr, vocab, scale, min_logit, reference, LANES: tl.constexpr, RUNS: tl.constexpr, FAST: tl.constexpr
):
    """Mass against `reference`, and number, of the row's tokens with a logit of at least `min_logit`."""
    mass = tl.zeros([LANES], tl.float32)
    number = tl.zeros([LANES], tl.int32)
    for tile in range(tl.cdiv(vocab, LANES * RUNS * 8)):
        cols = tile_tokens(tile, LANES, RUNS)
        x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        mass += tl.sum(tl.sum(tl.where(x >= min_logit, softmax_weight(x, scale, reference, FAST), 0.0), 2), 1)
        number += tl.sum(tl.sum((x >= min_logit).to(tl.int32), 2), 1)
    return tl.sum(mass, 0), tl.sum(number, 0)


@triton.jit
def sample_fallback(
    row_ptr, vocab, scale, top_k, top_p, min_logit, max_logit, reference, row_mass, noise,
    SHIFT: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Value and token that win among what the limits keep.

    It samples from all tokens of at least `min_logit`. If top-p rules the winner out, it samples again from the
    likelier tokens: 1 + ln(1 / top_p) rounds on average.
    """
    if top_k < vocab:
        low, high = to_ordered_int(tl.full([], -3.4e38, tl.float32), SHIFT) - 1, to_ordered_int(max_logit, SHIFT)
        while low + 1 < high:  # as `bisect` in sample_small_nucleus, over the whole row
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            _, number = _weigh_above(
                row_ptr, vocab, scale, from_ordered_int(middle + 1, SHIFT), reference, LANES, RUNS, FAST
            )
            less = number < top_k
            high = tl.where(less, middle, high)
            low = tl.where(less, low, middle)
        min_logit = tl.maximum(min_logit, from_ordered_int(high, SHIFT))
    bound = top_p * row_mass
    if min_logit > -3.4e38:
        left, _ = _weigh_above(row_ptr, vocab, scale, min_logit, reference, LANES, RUNS, FAST)
        bound = top_p * left
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0, tl.int32)
    searching = True
    while searching:
        best, token = _best_noisy(row_ptr, vocab, scale, min_logit, max_logit, noise, TILE, FAST)
        outside = False
        if top_p < 1.0:
            above = from_ordered_int(to_ordered_int(tl.load(row_ptr + token).to(tl.float32), SHIFT) + 1, SHIFT)
            before, _ = _weigh_above(row_ptr, vocab, scale, above, reference, LANES, RUNS, FAST)
            outside = before >= bound
            min_logit = tl.where(outside, above, min_logit)
        searching = outside
    return best, token
