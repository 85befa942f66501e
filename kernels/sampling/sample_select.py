"""The second kernel of `sample_tokens`, a program a row: what the first left decides, and few tokens are read again.

Greedy: the spans with the largest logit. Limits that keep few tokens: `draw_narrow`. No limits: the spans where the
noise can have made a winner. Limits that keep many are left to the kernels of `draw_wide`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.sampling.philox_triton import gumbel_at
from blockyard.kernels.sampling.sample_common import adjusted, bounded, counter, power, settings
from blockyard.kernels.sampling.sample_small_nucleus import (
    draw_among,
    gather,
    list_spans,
    lowest_kept,
    read_list,
    read_spans,
)


@triton.jit
def least_kept(top, scale, min_p):
    """The logit that min-p asks for where `top` is the largest."""
    return tl.where(min_p > 0, top + tl.log2(tl.where(min_p > 0, min_p, 1.0)) / scale, -3.4e38)


@triton.jit
def best_above(row_ptr, spans_ptr, num, floor, least, top, scale, vocab, noise, LANES: tl.constexpr,
               RUNS: tl.constexpr, CHUNK: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Of the listed spans' tokens above `floor` and not below `least`: the best value, its token and its logit."""
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(0, num, CHUNK):
        _there, ids, x = read_spans(row_ptr, spans_ptr, start, num, vocab, LANES, RUNS, CHUNK)
        value = (x - top) * (scale * 0.6931471805599453) + gumbel_at(ids, noise, FAST)
        value = tl.where((x > floor) & (x >= least), value, float("-inf"))
        here = tl.max(tl.max(value, 1), 0)
        lowest = tl.min(tl.min(tl.where(value == here, ids, 0x7FFFFFFF), 1), 0)
        token = tl.where(here > best, lowest, tl.where(here == best, tl.minimum(token, lowest), token))
        best = tl.maximum(best, here)
    token = tl.where(best > float("-inf"), token, 0)
    return best, token, tl.load(row_ptr + token).to(tl.float32)


@triton.jit
def sure_from(limit, reference, num, MOST_SPANS: tl.constexpr):
    """The least value that no token of a span that was no hit can have: inf where more were hit than are listed."""
    return tl.where(num <= MOST_SPANS, 0.02 - (reference + limit) * 0.6931471805599453, float("inf"))


@triton.jit
def _draw_limited(row_ptr, lists, tops, real, numbers, top, reference, whole, scale, top_k, top_p, min_p, vocab, noise,
                  SHIFT: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, CHUNK: tl.constexpr,
                  MOST_SPANS: tl.constexpr, MOST: tl.constexpr, STEPS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Best value and its token; -1 and the largest logit where the limits keep too many."""
    spans_ptr, values_ptr, ids_ptr = lists
    best = top
    token = tl.full([], -1, tl.int32)
    least = least_kept(top, scale, min_p)
    plain = (top_k >= vocab) & (min_p <= 0)
    bound = lowest_kept(tops, real, top, reference, whole, scale, top_k, top_p, least, vocab, STEPS, FAST)
    num = list_spans(spans_ptr, real & (tops >= bound), numbers, MOST_SPANS)
    if num <= CHUNK:
        there, ids, x = read_spans(row_ptr, spans_ptr, 0, num, vocab, LANES, RUNS, CHUNK)
        size: tl.constexpr = CHUNK * RUNS * 8
        there = tl.reshape(there, [size])
        ids = tl.reshape(ids, [size])
        x = tl.reshape(x, [size])
        best, token = draw_among(
            there, ids, x, bound, top, reference, whole, scale, top_k, top_p, plain, vocab, noise, SHIFT, FAST
        )
    elif num <= MOST_SPANS:
        count = gather(row_ptr, spans_ptr, values_ptr, ids_ptr, num, bound, vocab, LANES, RUNS, CHUNK, MOST)
        if count <= MOST:
            tl.debug_barrier()
            there, ids, x = read_list(values_ptr, ids_ptr, count, MOST)
            best, token = draw_among(
                there, ids, x, bound, top, reference, whole, scale, top_k, top_p, plain, vocab, noise, SHIFT, FAST
            )
    return best, token


@triton.jit
def _choose_row(row, slot, row_ptr, rows, limits, spans, parts, limit_ptr, lists, whole_ptr, vocab, num_slots,
                num_spans, programs, SHIFT: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr,
                ALL_SPANS: tl.constexpr, PROGRAMS: tl.constexpr, CHUNK: tl.constexpr, MOST_SPANS: tl.constexpr,
                MOST: tl.constexpr, STEPS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Best value and its token; below 0, and the largest logit, where others go on: -1 with noise, -2 anew."""
    greedy, scale, top_k, top_p, min_p, limited = settings(slot, limits, vocab)
    mine = (lists[0] + row * MOST_SPANS, lists[1] + row * MOST, lists[2] + row * MOST)
    numbers = tl.arange(0, ALL_SPANS)
    real = numbers < num_spans
    tops = tl.load(spans[0] + row * num_spans + numbers, mask=real, other=float("-inf"))
    places = tl.arange(0, PROGRAMS)
    mass = tl.load(parts[1] + row * programs + places, mask=places < programs, other=0.0)
    references = tl.load(parts[0] + row * programs + places, mask=places < programs, other=-3e38)
    top = tl.max(tops, 0)
    best = top
    token = tl.full([], 0, tl.int32)
    broken = tl.max(tl.where(mass < float("inf"), 0, 1), 0) > 0
    if broken | (top == float("-inf")):
        best = tl.where(broken, float("nan"), float("-inf"))
    elif greedy:
        num = list_spans(mine[0], real & (tops == top), numbers, MOST_SPANS)
        # the first LANES of these spans have the lowest token
        _there, ids, x = read_spans(row_ptr, mine[0], 0, num, vocab, LANES, RUNS, LANES)
        token = tl.min(tl.min(tl.where(x == top, ids, 0x7FFFFFFF), 1), 0)
    else:
        noise = counter(row, slot, rows, limits, num_slots)
        reference = bounded(top, scale)
        whole = tl.sum(mass * power(references - reference, FAST), 0)
        tl.store(whole_ptr + row, whole)
        if limited:
            best, token = _draw_limited(
                row_ptr, mine, tops, real, numbers, top, reference, whole, scale, top_k, top_p, min_p, vocab, noise,
                SHIFT, LANES, RUNS, CHUNK, MOST_SPANS, MOST, STEPS, FAST,
            )  # fmt: skip
            if top_k < vocab:
                token = tl.where(token < 0, -2, token)
        else:
            hits = tl.load(spans[1] + row * num_spans + numbers, mask=real, other=0) > 0
            num = list_spans(mine[0], hits, numbers, MOST_SPANS)
            sure = sure_from(tl.load(limit_ptr + row), reference, num, MOST_SPANS)
            num = tl.minimum(num, MOST_SPANS)
            best, token, _x = best_above(
                row_ptr, mine[0], num, float("-inf"), -3.4e38, top, scale, vocab, noise, LANES, RUNS, CHUNK, FAST
            )
            token = tl.where(best >= sure, token, -2)
            best = tl.where(best >= sure, best, top)
    return best, token


@triton.jit
def sample_select_kernel(
    logits_ptr,
    rows,
    limits,
    other,
    spans,
    parts,
    limit_ptr,
    lists,
    whole_ptr,
    out,
    arrived_ptr,
    stride,
    vocab,
    num_slots,
    num_spans,
    programs,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    RUNS: tl.constexpr,
    ALL_SPANS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_SPANS: tl.constexpr,
    MOST: tl.constexpr,
    STEPS: tl.constexpr,
    OTHER: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    # program i has row i
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows[0] + row)
    best = tl.full([], 0.0, tl.float32)
    token = tl.full([], 0, tl.int32)
    if slot >= 0:
        is_adjusted = slot < 0
        if OTHER:
            other_ptr, is_adjusted = adjusted(slot, other)
            if is_adjusted:
                best, token = _choose_row(
                    row, slot, other_ptr, rows, limits, spans, parts, limit_ptr, lists, whole_ptr, vocab, num_slots,
                    num_spans, programs, 0, LANES, RUNS, ALL_SPANS, PROGRAMS, CHUNK, MOST_SPANS, MOST, STEPS, FAST,
                )  # fmt: skip
        if not is_adjusted:
            best, token = _choose_row(
                row, slot, logits_ptr + row * stride, rows, limits, spans, parts, limit_ptr, lists, whole_ptr, vocab,
                num_slots, num_spans, programs, SHIFT, LANES, RUNS, ALL_SPANS, PROGRAMS, CHUNK, MOST_SPANS, MOST, STEPS,
                FAST,
            )  # fmt: skip
    tl.store(arrived_ptr + row * 2, 0)
    tl.store(arrived_ptr + row * 2 + 1, 0)
    tl.store(out[0] + row, token.to(tl.int64))
    tl.store(out[1] + row, best)
