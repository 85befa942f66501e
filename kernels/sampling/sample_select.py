"""Second kernel of `sample_tokens`, one program a row: decides from the scan's results, and reads few spans again.

Greedy rows read the spans with the largest logit. Rows with limits that keep few tokens go to `sample_small_nucleus`.
Rows without limits read the candidate spans. Rows with limits that keep many tokens are left to the kernels of
`sample_large_nucleus`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.sampling.philox_triton import gumbel_at
from blockyard.kernels.sampling.sample_common import (
    adjusted_row,
    fast_exp2,
    load_counter,
    load_params,
    softmax_reference,
)
from blockyard.kernels.sampling.sample_small_nucleus import (
    gather_candidates,
    kept_bound,
    list_spans,
    read_list,
    read_spans,
    sample_among,
)


@triton.jit
def min_p_bound(max_logit, scale, min_p):
    """The smallest logit that min-p keeps where `max_logit` is the largest."""
    return tl.where(min_p > 0, max_logit + tl.log2(tl.where(min_p > 0, min_p, 1.0)) / scale, -3.4e38)


@triton.jit
def best_above(
    row_ptr, spans_ptr, num, floor, min_logit, max_logit, scale, vocab, noise,
    LANES: tl.constexpr, RUNS: tl.constexpr, CHUNK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Among the listed spans' tokens with a logit above `floor` and at least `min_logit`: the best perturbed logit, its
    token and its logit.
    """
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(0, num, CHUNK):
        _there, ids, x = read_spans(row_ptr, spans_ptr, start, num, vocab, LANES, RUNS, CHUNK)
        value = (x - max_logit) * (scale * 0.6931471805599453) + gumbel_at(ids, noise, FAST)
        value = tl.where((x > floor) & (x >= min_logit), value, float("-inf"))
        here = tl.max(tl.max(value, 1), 0)
        lowest = tl.min(tl.min(tl.where(value == here, ids, 0x7FFFFFFF), 1), 0)
        token = tl.where(here > best, lowest, tl.where(here == best, tl.minimum(token, lowest), token))
        best = tl.maximum(best, here)
    token = tl.where(best > float("-inf"), token, 0)
    return best, token, tl.load(row_ptr + token).to(tl.float32)


@triton.jit
def certain_above(limit, reference, num, MAX_SPANS: tl.constexpr):
    """The value above which a winner is certain: no token of a span that was no candidate can have more.

    It is inf where more spans are candidates than are listed.
    """
    return tl.where(num <= MAX_SPANS, 0.02 - (reference + limit) * 0.6931471805599453, float("inf"))


@triton.jit
def _sample_limited(
    row_ptr, lists, span_max, real, span_ids, max_logit, reference, row_mass, scale, top_k, top_p, min_p, vocab, noise,
    SHIFT: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, CHUNK: tl.constexpr, MAX_SPANS: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr, STEPS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Best value and its token; token -1 and the largest logit where the limits keep too many tokens."""
    spans_ptr, values_ptr, ids_ptr = lists
    best = max_logit
    token = tl.full([], -1, tl.int32)
    min_logit = min_p_bound(max_logit, scale, min_p)
    only_top_p = (top_k >= vocab) & (min_p <= 0)
    bound = kept_bound(
        span_max, real, max_logit, reference, row_mass, scale, top_k, top_p, min_logit, vocab, STEPS, FAST
    )
    num = list_spans(spans_ptr, real & (span_max >= bound), span_ids, MAX_SPANS)
    if num <= CHUNK:
        there, ids, x = read_spans(row_ptr, spans_ptr, 0, num, vocab, LANES, RUNS, CHUNK)
        size: tl.constexpr = CHUNK * RUNS * 8
        there = tl.reshape(there, [size])
        ids = tl.reshape(ids, [size])
        x = tl.reshape(x, [size])
        best, token = sample_among(
            there, ids, x, bound, max_logit, reference, row_mass, scale, top_k, top_p, only_top_p, vocab, noise, SHIFT,
            FAST,
        )  # fmt: skip
    elif num <= MAX_SPANS:
        count = gather_candidates(
            row_ptr, spans_ptr, values_ptr, ids_ptr, num, bound, vocab, LANES, RUNS, CHUNK, MAX_CANDIDATES
        )
        if count <= MAX_CANDIDATES:
            tl.debug_barrier()
            there, ids, x = read_list(values_ptr, ids_ptr, count, MAX_CANDIDATES)
            best, token = sample_among(
                there, ids, x, bound, max_logit, reference, row_mass, scale, top_k, top_p, only_top_p, vocab, noise,
                SHIFT, FAST,
            )  # fmt: skip
    return best, token


@triton.jit
def _select_row(
    row, slot, row_ptr, rows, limits, spans, parts, limit_ptr, lists, row_mass_ptr, vocab, num_slots, num_spans,
    programs,
    SHIFT: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, ALL_SPANS: tl.constexpr, PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr, MAX_SPANS: tl.constexpr, MAX_CANDIDATES: tl.constexpr, STEPS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Best value and its token; a negative token and the largest logit where later kernels go on: -1 with the noise of
    the whole row, -2 by the fallback.
    """
    greedy, scale, top_k, top_p, min_p, limited = load_params(slot, limits, vocab)
    mine = (lists[0] + row * MAX_SPANS, lists[1] + row * MAX_CANDIDATES, lists[2] + row * MAX_CANDIDATES)
    span_ids = tl.arange(0, ALL_SPANS)
    real = span_ids < num_spans
    span_max = tl.load(spans[0] + row * num_spans + span_ids, mask=real, other=float("-inf"))
    places = tl.arange(0, PROGRAMS)
    mass = tl.load(parts[1] + row * programs + places, mask=places < programs, other=0.0)
    references = tl.load(parts[0] + row * programs + places, mask=places < programs, other=-3e38)
    max_logit = tl.max(span_max, 0)
    best = max_logit
    token = tl.full([], 0, tl.int32)
    broken = tl.max(tl.where(mass < float("inf"), 0, 1), 0) > 0
    if broken | (max_logit == float("-inf")):
        best = tl.where(broken, float("nan"), float("-inf"))
    elif greedy:
        num = list_spans(mine[0], real & (span_max == max_logit), span_ids, MAX_SPANS)
        # the first LANES of these spans hold the lowest token
        _there, ids, x = read_spans(row_ptr, mine[0], 0, num, vocab, LANES, RUNS, LANES)
        token = tl.min(tl.min(tl.where(x == max_logit, ids, 0x7FFFFFFF), 1), 0)
    else:
        noise = load_counter(row, slot, rows, limits, num_slots)
        reference = softmax_reference(max_logit, scale)
        row_mass = tl.sum(mass * fast_exp2(references - reference, FAST), 0)
        tl.store(row_mass_ptr + row, row_mass)
        if limited:
            best, token = _sample_limited(
                row_ptr, mine, span_max, real, span_ids, max_logit, reference, row_mass, scale, top_k, top_p, min_p,
                vocab, noise, SHIFT, LANES, RUNS, CHUNK, MAX_SPANS, MAX_CANDIDATES, STEPS, FAST,
            )  # fmt: skip
            if top_k < vocab:
                token = tl.where(token < 0, -2, token)
        else:
            hits = tl.load(spans[1] + row * num_spans + span_ids, mask=real, other=0) > 0
            num = list_spans(mine[0], hits, span_ids, MAX_SPANS)
            certain = certain_above(tl.load(limit_ptr + row), reference, num, MAX_SPANS)
            num = tl.minimum(num, MAX_SPANS)
            best, token, _x = best_above(
                row_ptr, mine[0], num, float("-inf"), -3.4e38, max_logit, scale, vocab, noise, LANES, RUNS, CHUNK, FAST
            )
            token = tl.where(best >= certain, token, -2)
            best = tl.where(best >= certain, best, max_logit)
    return best, token


@triton.jit
def sample_select_kernel(
    logits_ptr, rows, limits, adjusted, spans, parts, limit_ptr, lists, row_mass_ptr, out, semaphores_ptr, stride,
    vocab, num_slots, num_spans, programs,
    SHIFT: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, ALL_SPANS: tl.constexpr, PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr, MAX_SPANS: tl.constexpr, MAX_CANDIDATES: tl.constexpr, STEPS: tl.constexpr,
    ADJUSTED: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program i: row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows[0] + row)
    best = tl.full([], 0.0, tl.float32)
    token = tl.full([], 0, tl.int32)
    if slot >= 0:
        is_adjusted = slot < 0
        if ADJUSTED:
            adjusted_ptr, is_adjusted = adjusted_row(slot, adjusted)
            if is_adjusted:
                best, token = _select_row(
                    row, slot, adjusted_ptr, rows, limits, spans, parts, limit_ptr, lists, row_mass_ptr, vocab,
                    num_slots, num_spans, programs, 0, LANES, RUNS, ALL_SPANS, PROGRAMS, CHUNK, MAX_SPANS,
                    MAX_CANDIDATES, STEPS, FAST,
                )  # fmt: skip
        if not is_adjusted:
            best, token = _select_row(
                row, slot, logits_ptr + row * stride, rows, limits, spans, parts, limit_ptr, lists, row_mass_ptr,
                vocab, num_slots, num_spans, programs, SHIFT, LANES, RUNS, ALL_SPANS, PROGRAMS, CHUNK, MAX_SPANS,
                MAX_CANDIDATES, STEPS, FAST,
            )  # fmt: skip
    tl.store(semaphores_ptr + row * 2, 0)
    tl.store(semaphores_ptr + row * 2 + 1, 0)
    tl.store(out[0] + row, token.to(tl.int64))
    tl.store(out[1] + row, best)
