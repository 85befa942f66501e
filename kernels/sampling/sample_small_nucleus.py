"""Device functions that sample a row with limits that keep few tokens, one program a row, for `sample_tokens`.

Spans that can hold a kept token are found by their largest logits. Their tokens are listed, and the exact threshold is
found by bisection over the ordered integers of the list.
"""

import triton
import triton.language as tl

from blockyard.kernels.sampling.philox_triton import gumbel_at
from blockyard.kernels.sampling.sample_common import softmax_weight, span_tokens, to_ordered_int


@triton.jit
def bisect(ordered, weights, target, low, high):
    """The smallest t above `low` for which the weights above t sum to less than `target`; `high` is such a t."""
    while low + 1 < high:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        less = tl.sum(tl.where(ordered > middle, weights, 0.0), 0) < target
        high = tl.where(less, middle, high)
        low = tl.where(less, low, middle)
    return high


@triton.jit
def search_bound(values, weights, goal, low, high, STEPS: tl.constexpr):
    """A value between `low` and `high`, as large as STEPS bisections find it, at or above which the weight is at least
    `goal`; `low` where even that has less.
    """
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        enough = tl.sum(tl.where(values >= middle, weights, 0.0), 0) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def kept_bound(
    span_max, real, max_logit, reference, row_mass, scale, top_k, top_p, min_logit, vocab,
    STEPS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """A logit below which the limits keep no token.

    span_max [spans] is the largest logit of each span, so it is a token of each.
    """
    bound = tl.maximum(tl.full([], -3.4e38, tl.float32), min_logit)
    # with another limit, top-p is a share of a mass that is not known yet
    if (top_p < 1.0) & (top_k >= vocab) & (min_logit <= -3.4e38):
        # all tokens below together weigh less than 1 - top_p of the largest logit
        low = max_logit - (tl.log2(vocab.to(tl.float32)) - tl.log2(tl.maximum(1 - top_p, 1e-7))) / scale
        weights = tl.where(real, softmax_weight(span_max, scale, reference, FAST), 0.0)
        bound = tl.maximum(search_bound(span_max, weights, top_p * row_mass, low, max_logit, STEPS), bound)
    if top_k < vocab:  # the k-th largest token is not below the k-th largest span
        wanted, ones = top_k.to(tl.float32), tl.where(real, 1.0, 0.0)
        low = tl.maximum(tl.min(tl.where(real, span_max, max_logit), 0), max_logit - 100)
        if tl.sum(tl.where(span_max >= low, ones, 0.0), 0) >= wanted:
            bound = tl.maximum(search_bound(span_max, ones, wanted, low, max_logit, STEPS), bound)
    return bound


@triton.jit
def list_spans(spans_ptr, near, span_ids, MAX_SPANS: tl.constexpr):
    """Lists the `near` spans in order, MAX_SPANS at most, and returns how many there are."""
    ones = near.to(tl.int32)
    places = tl.cumsum(ones, 0) - 1
    tl.debug_barrier()  # the list before has been read by all threads
    tl.store(spans_ptr + places, span_ids, mask=near & (places < MAX_SPANS))
    tl.debug_barrier()
    return tl.sum(ones, 0)


@triton.jit
def read_spans(row_ptr, spans_ptr, start, num, vocab, LANES: tl.constexpr, RUNS: tl.constexpr, CHUNK: tl.constexpr):
    """For the listed spans from `start` on, returns which tokens exist, their ids and their logits, [CHUNK, RUNS * 8]
    each.
    """
    which = start + tl.arange(0, CHUNK)
    ids = span_tokens(tl.load(spans_ptr + which, mask=which < num, other=0), LANES, RUNS)
    there = (which < num)[:, None] & (ids < vocab)
    return there, ids, tl.load(row_ptr + ids, mask=there, other=float("-inf")).to(tl.float32)


@triton.jit
def gather_candidates(
    row_ptr, spans_ptr, values_ptr, ids_ptr, num, bound, vocab,
    LANES: tl.constexpr, RUNS: tl.constexpr, CHUNK: tl.constexpr, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Lists the tokens of `num` listed spans with a logit of at least `bound`, MAX_CANDIDATES at most; returns their
    number.
    """
    count = tl.full([], 0, tl.int32)
    for start in range(0, num, CHUNK):
        there, cols, x = read_spans(row_ptr, spans_ptr, start, num, vocab, LANES, RUNS, CHUNK)
        taken = there & (x >= bound)
        ones = taken.to(tl.int32)
        each = tl.sum(ones, 1)
        places = count + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(ones, 1) - 1
        fits = taken & (places < MAX_CANDIDATES)
        tl.store(values_ptr + places, x, mask=fits)
        tl.store(ids_ptr + places, cols, mask=fits)
        count += tl.sum(each, 0)
    return count


@triton.jit
def read_list(values_ptr, ids_ptr, count, MAX_CANDIDATES: tl.constexpr):
    """For listed tokens, returns which exist, their ids and their logits, [MAX_CANDIDATES] each."""
    places = tl.arange(0, MAX_CANDIDATES)
    there = places < count
    x = tl.load(values_ptr + places, mask=there, other=float("-inf"))
    return there, tl.load(ids_ptr + places, mask=there, other=0), x


@triton.jit
def sample_among(
    there, ids, x, bound, max_logit, reference, row_mass, scale, top_k, top_p, only_top_p, vocab, noise, shift,
    FAST: tl.constexpr,
):  # fmt: skip
    """Value and token of the winner among the kept ones of these tokens.

    No token outside of these is kept. only_top_p: top-p is the only limit. row_mass: the row's sum of weights against
    `reference`.
    """
    there = there & (x >= bound)
    ordered = to_ordered_int(x, shift)
    low, high = to_ordered_int(bound, shift) - 1, to_ordered_int(max_logit, shift)
    if top_k < vocab:
        kth = bisect(ordered, tl.where(there, 1.0, 0.0), top_k.to(tl.float32), low, high)
        there = there & (ordered >= kth)
    if top_p < 1.0:
        shares = tl.where(there, softmax_weight(x, scale, reference, FAST), 0.0)
        kept = top_p * tl.where(only_top_p, row_mass, tl.sum(shares, 0))
        there = there & (ordered >= bisect(ordered, shares, kept, low, high))
    value = (x - max_logit) * (scale * 0.6931471805599453) + gumbel_at(ids, noise, FAST)
    value = tl.where(there, value, float("-inf"))
    best = tl.max(value, 0)
    return best, tl.min(tl.where(there & (value == best), ids, 0x7FFFFFFF), 0)
