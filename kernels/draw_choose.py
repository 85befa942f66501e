"""The second kernel of `draw_tokens`, a program a row: what the first left decides, and few tokens are read again.

Greedy: the spans with the largest logit. Limits that keep few tokens: `draw_narrow`. Else the spans where the noise
can have made a winner. Where top-p may rule that out, the winners of smaller and smaller sets are left to the third
kernel, which weighs what is likelier than each.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.draw_common import adjusted, bounded, counter, power, settings, span_tokens
from blockyard.kernels.draw_narrow import draw_listed, gather, list_spans, lowest_kept
from blockyard.kernels.philox_triton import gumbel_at


@triton.jit
def least_kept(top, scale, min_p):
    """The logit that min-p asks for where `top` is the largest."""
    return tl.where(min_p > 0, top + tl.log2(tl.where(min_p > 0, min_p, 1.0)) / scale, -3.4e38)


@triton.jit
def _lowest(row_ptr, spans_ptr, num, top, vocab, LANES: tl.constexpr, RUNS: tl.constexpr):
    """The lowest token of the listed spans whose logit is `top`; the first LANES of them hold it."""
    which = tl.arange(0, LANES)
    cols = span_tokens(tl.load(spans_ptr + which, mask=which < num, other=0), LANES, RUNS)
    there = (which < num)[:, None] & (cols < vocab)
    x = tl.load(row_ptr + cols, mask=there, other=float("-inf")).to(tl.float32)
    return tl.min(tl.min(tl.where(x == top, cols, 0x7FFFFFFF), 1), 0)


@triton.jit
def _best_above(row_ptr, spans_ptr, num, floor, least, top, scale, vocab, noise, LANES: tl.constexpr,
                RUNS: tl.constexpr, CHUNK: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Of the listed spans' tokens above `floor` and not below `least`: the best value, its token and its logit."""
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], 0x7FFFFFFF, tl.int32)
    for start in range(0, num, CHUNK):
        which = start + tl.arange(0, CHUNK)
        cols = span_tokens(tl.load(spans_ptr + which, mask=which < num, other=0), LANES, RUNS)
        there = (which < num)[:, None] & (cols < vocab)
        x = tl.load(row_ptr + cols, mask=there, other=float("-inf")).to(tl.float32)
        value = (x - top) * (scale * 0.6931471805599453) + gumbel_at(cols, noise, FAST)
        value = tl.where((x > floor) & (x >= least), value, float("-inf"))
        here = tl.max(tl.max(value, 1), 0)
        lowest = tl.min(tl.min(tl.where(value == here, cols, 0x7FFFFFFF), 1), 0)
        token = tl.where(here > best, lowest, tl.where(here == best, tl.minimum(token, lowest), token))
        best = tl.maximum(best, here)
    token = tl.where(best > float("-inf"), token, 0)
    return best, token, tl.load(row_ptr + token).to(tl.float32)


@triton.jit
def _choose_row(row, slot, row_ptr, rows, limits, spans, parts, limit_ptr, lists, wide, vocab, num_slots, num_spans,
                programs, SHIFT: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, ALL_SPANS: tl.constexpr,
                PROGRAMS: tl.constexpr, CHUNK: tl.constexpr, MOST_SPANS: tl.constexpr, MOST: tl.constexpr,
                STEPS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Best value and its token; below 0 where that is left to the third kernel: -1 it weighs, -2 it starts anew."""
    best = tl.full([], 0.0, tl.float32)
    token = tl.full([], 0, tl.int32)
    greedy, scale, top_k, top_p, min_p, limited = settings(slot, limits, vocab)
    spans_ptr, values_ptr, ids_ptr = lists[0] + row * MOST_SPANS, lists[1] + row * MOST, lists[2] + row * MOST
    numbers = tl.arange(0, ALL_SPANS)
    real = numbers < num_spans
    tops = tl.load(spans[0] + row * num_spans + numbers, mask=real, other=float("-inf"))
    places = tl.arange(0, PROGRAMS)
    mass = tl.load(parts[1] + row * programs + places, mask=places < programs, other=0.0)
    references = tl.load(parts[0] + row * programs + places, mask=places < programs, other=-3e38)
    top = tl.max(tops, 0)
    broken = tl.max(tl.where(mass < float("inf"), 0, 1), 0) > 0
    if broken | (top == float("-inf")):
        best = tl.where(broken, float("nan"), float("-inf"))
    elif greedy:
        num = list_spans(spans_ptr, real & (tops == top), numbers, MOST_SPANS)
        token = _lowest(row_ptr, spans_ptr, num, top, vocab, LANES, RUNS)
        best = top
    else:
        noise = counter(row, slot, rows, limits, num_slots)
        reference = bounded(top, scale)
        whole = tl.sum(mass * power(references - reference, FAST), 0)
        least = least_kept(top, scale, min_p)
        count = tl.full([], MOST + 1, tl.int32)
        bound = least
        if limited:
            bound = lowest_kept(tops, real, top, reference, whole, scale, top_k, top_p, least, vocab, STEPS, FAST)
            near = real & (tops >= bound)
            if tl.sum(near.to(tl.int32), 0) <= MOST_SPANS:
                num = list_spans(spans_ptr, near, numbers, MOST_SPANS)
                count = gather(row_ptr, spans_ptr, values_ptr, ids_ptr, num, bound, vocab, LANES, RUNS, CHUNK, MOST)
                tl.debug_barrier()
        if count <= MOST:
            plain = (top_k >= vocab) & (min_p <= 0)
            best, token = draw_listed(
                values_ptr, ids_ptr, count, bound, top, reference, whole, scale, top_k, top_p, plain, vocab, noise,
                SHIFT, MOST, FAST,
            )  # fmt: skip
        else:
            hits = tl.load(spans[1] + row * num_spans + numbers, mask=real, other=0) > 0
            num = list_spans(spans_ptr, hits, numbers, MOST_SPANS)
            # tokens of other spans have less
            sure = 0.02 - (reference + tl.load(limit_ptr + row)) * 0.6931471805599453
            sure = tl.where(num <= MOST_SPANS, sure, float("inf"))
            num = tl.minimum(num, MOST_SPANS)
            floor = tl.full([], float("-inf"), tl.float32)
            rounds = tl.where(top_p < 1.0, 4, 1)
            turn = 0
            while turn < rounds:
                best, token, floor = _best_above(
                    row_ptr, spans_ptr, num, floor, least, top, scale, vocab, noise, LANES, RUNS, CHUNK, FAST
                )
                tl.store(wide[0] + row * 4 + turn, tl.where(best >= sure, best, float("-inf")))
                tl.store(wide[1] + row * 4 + turn, token)
                turn += 1
                rounds = tl.where(best >= sure, rounds, turn)  # a smaller set's winner is no better
            if (top_k < vocab) | ((turn == 1) & (best < sure)):
                token = tl.full([], -2, tl.int32)
            elif top_p < 1.0:
                token = tl.full([], -1, tl.int32)
                while turn < 4:
                    tl.store(wide[0] + row * 4 + turn, float("-inf"))
                    tl.store(wide[1] + row * 4 + turn, 0)
                    turn += 1
            tl.store(wide[2] + row, whole)
            best = tl.where(token < 0, top, best)
    return best, token


@triton.jit
def choose_kernel(
    logits_ptr,
    rows,
    limits,
    other,
    spans,
    parts,
    limit_ptr,
    lists,
    wide,
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
    OVERLAP: tl.constexpr,
):
    # program i has row i
    if OVERLAP:
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
                    row, slot, other_ptr, rows, limits, spans, parts, limit_ptr, lists, wide, vocab, num_slots,
                    num_spans, programs, 0, LANES, RUNS, ALL_SPANS, PROGRAMS, CHUNK, MOST_SPANS, MOST, STEPS, FAST,
                )  # fmt: skip
        if not is_adjusted:
            best, token = _choose_row(
                row, slot, logits_ptr + row * stride, rows, limits, spans, parts, limit_ptr, lists, wide, vocab,
                num_slots, num_spans, programs, SHIFT, LANES, RUNS, ALL_SPANS, PROGRAMS, CHUNK, MOST_SPANS, MOST, STEPS,
                FAST,
            )  # fmt: skip
    tl.store(arrived_ptr + row, 0)
    tl.store(out[0] + row, token.to(tl.int64))
    tl.store(out[1] + row, best)
