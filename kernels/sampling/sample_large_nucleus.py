"""The last two kernels of `sample_tokens`, for rows whose limits keep many tokens.

The threshold is not looked for. The third kernel finds the spans where the noise can have made a winner, now that the
row's mass is known, and winners of smaller and smaller sets: of all tokens, then each of those that are likelier than
the last winner. The first of them that what is likelier leaves room for is the winner among what top-p keeps. The
fourth weighs what is likelier than each, in one read. Several programs a row; the last of them to arrive goes on.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.sampling.sample_common import (
    adjusted,
    bounded,
    counter,
    key_of,
    settings,
    tile_tokens,
    to_float,
    value_of,
    weight,
)
from blockyard.kernels.sampling.sample_fallback import settle
from blockyard.kernels.sampling.sample_scan import noisy_tile
from blockyard.kernels.sampling.sample_select import best_above, least_kept, sure_from
from blockyard.kernels.sampling.sample_small_nucleus import list_spans


@triton.jit
def _noise_row(row, slot, row_ptr, rows, limits, hits_ptr, lists, wide, out, arrived_ptr, vocab, num_slots, num_spans,
               tiles, CHANCES: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, ALL_SPANS: tl.constexpr,
               CHUNK: tl.constexpr, MOST_SPANS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    _greedy, scale, _top_k, top_p, min_p, _limited = settings(slot, limits, vocab)
    noise = counter(row, slot, rows, limits, num_slots)
    top = tl.load(out[1] + row)
    reference = bounded(top, scale)
    # so many of what top-p keeps; what min-p rules out is not known
    limit = tl.log2(CHANCES / (tl.load(wide[2] + row) * tl.maximum(top_p, 0.01))) - reference
    first, programs = tl.program_id(1) * tiles, tl.num_programs(1)
    hits_ptr += row * num_spans
    lanes = tl.arange(0, LANES)
    for tile in range(first, tl.minimum(first + tiles, tl.cdiv(num_spans, LANES))):
        _top, _reference, _mass, hit = noisy_tile(row_ptr, tile, vocab, scale, limit, noise, LANES, RUNS, FAST)
        tl.store(hits_ptr + tile * LANES + lanes, hit.to(tl.int8))
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row * 2, 1) == programs - 1:
        spans_ptr = lists[0] + row * MOST_SPANS
        numbers = tl.arange(0, ALL_SPANS)
        hits = tl.load(hits_ptr + numbers, mask=numbers < num_spans, other=0) > 0
        num = list_spans(spans_ptr, hits, numbers, MOST_SPANS)
        sure = sure_from(limit, reference, num, MOST_SPANS)
        num = tl.minimum(num, MOST_SPANS)
        least = least_kept(top, scale, min_p)
        floor = tl.full([], float("-inf"), tl.float32)
        token = tl.full([], 0, tl.int32)
        turn = 0
        while turn < 4:
            best, token, floor = best_above(
                row_ptr, spans_ptr, num, floor, least, top, scale, vocab, noise, LANES, RUNS, CHUNK, FAST
            )
            known = best >= sure
            tl.store(wide[0] + row * 4 + turn, tl.where(known, best, float("-inf")))
            tl.store(wide[1] + row * 4 + turn, token)
            floor = tl.where(known, floor, float("inf"))  # a smaller set's winner is no better: nothing is left
            turn += 1


@triton.jit
def sample_noise_kernel(
    logits_ptr,
    rows,
    limits,
    other,
    hits_ptr,
    lists,
    wide,
    out,
    arrived_ptr,
    stride,
    vocab,
    num_slots,
    num_spans,
    tiles,
    CHANCES: tl.constexpr,
    LANES: tl.constexpr,
    RUNS: tl.constexpr,
    ALL_SPANS: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_SPANS: tl.constexpr,
    OTHER: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    # program (i, j) has `tiles` tiles of row i, from tile j * tiles on
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out[0] + row) != -1:
        return
    slot = tl.load(rows[0] + row)
    if OTHER:
        other_ptr, is_adjusted = adjusted(slot, other)
        if is_adjusted:
            _noise_row(row, slot, other_ptr, rows, limits, hits_ptr, lists, wide, out, arrived_ptr, vocab, num_slots,
                       num_spans, tiles, CHANCES, LANES, RUNS, ALL_SPANS, CHUNK, MOST_SPANS, FAST)  # fmt: skip
            return
    _noise_row(row, slot, logits_ptr + row * stride, rows, limits, hits_ptr, lists, wide, out, arrived_ptr, vocab,
               num_slots, num_spans, tiles, CHANCES, LANES, RUNS, ALL_SPANS, CHUNK, MOST_SPANS, FAST)  # fmt: skip


@triton.jit
def _from(x, least, FAST: tl.constexpr):
    """1.0 where x is `least` or more, else 0.0."""
    if FAST:  # one instruction in place of two
        ones = tl.inline_asm_elementwise("set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [x, least], tl.float32, True, 1)
    else:
        ones = (x >= least).to(tl.float32)
    return ones


@triton.jit
def _limit_of(row_ptr, token, SHIFT: tl.constexpr):
    """The least logit that is above a token's."""
    return value_of(key_of(tl.load(row_ptr + token).to(tl.float32), SHIFT) + 1, SHIFT)


@triton.jit
def _wide_row(row, slot, row_ptr, rows, limits, wide, sums_ptr, out, arrived_ptr, vocab, num_slots, tiles,
              SHIFT: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
              PROGRAMS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    _greedy, scale, top_k, top_p, min_p, _limited = settings(slot, limits, vocab)
    noise = counter(row, slot, rows, limits, num_slots)
    top, whole = tl.load(out[1] + row), tl.load(wide[2] + row)
    reference = bounded(top, scale)
    least = least_kept(top, scale, min_p)
    first, programs = tl.program_id(1) * tiles, tl.num_programs(1)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], -1, tl.int32)
    last = True
    if tl.load(out[0] + row) == -1:
        values, tokens = wide[0] + row * 4, wide[1] + row * 4
        t0 = _limit_of(row_ptr, tl.load(tokens), SHIFT)
        t1 = _limit_of(row_ptr, tl.load(tokens + 1), SHIFT)
        t2 = _limit_of(row_ptr, tl.load(tokens + 2), SHIFT)
        t3 = tl.where(min_p > 0, least, _limit_of(row_ptr, tl.load(tokens + 3), SHIFT))
        m0 = tl.zeros([LANES], tl.float32)
        m1 = tl.zeros([LANES], tl.float32)
        m2 = tl.zeros([LANES], tl.float32)
        m3 = tl.zeros([LANES], tl.float32)
        end = tl.minimum(first + tiles, tl.cdiv(vocab, LANES * RUNS * 8))
        for back in tl.range(0, end - first, num_stages=STAGES):
            cols = tile_tokens(end - 1 - back, LANES, RUNS)  # what the first kernel read last may still be near
            x = to_float(tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")), FAST)
            share = weight(x, scale, reference, FAST)
            m0 += tl.sum(tl.sum(_from(x, t0, FAST) * share, 2), 1)
            m1 += tl.sum(tl.sum(_from(x, t1, FAST) * share, 2), 1)
            m2 += tl.sum(tl.sum(_from(x, t2, FAST) * share, 2), 1)
            m3 += tl.sum(tl.sum(_from(x, t3, FAST) * share, 2), 1)
        place = sums_ptr + (row * programs + tl.program_id(1)) * 4
        tl.store(place, tl.sum(m0, 0))
        tl.store(place + 1, tl.sum(m1, 0))
        tl.store(place + 2, tl.sum(m2, 0))
        tl.store(place + 3, tl.sum(m3, 0))
        tl.debug_barrier()
        last = tl.atomic_add(arrived_ptr + row * 2 + 1, 1) == programs - 1
        if last:
            each = tl.arange(0, PROGRAMS)
            turn = 0
            left = whole
            if min_p > 0:
                left = tl.sum(tl.load(sums_ptr + (row * programs + each) * 4 + 3, mask=each < programs, other=0.0), 0)
            turns = tl.where(min_p > 0, 3, 4)
            while turn < turns:
                sums = tl.load(sums_ptr + (row * programs + each) * 4 + turn, mask=each < programs, other=0.0)
                value = tl.load(values + turn)
                kept = (value > float("-inf")) & (tl.sum(sums, 0) < top_p * left)
                best = tl.where(kept, value, best)
                token = tl.where(kept, tl.load(tokens + turn), token)
                turn = tl.where(kept, turns, turn + 1)
    else:
        last = tl.program_id(1) == 0
    if last:
        if token < 0:
            best, token = settle(
                row_ptr, vocab, scale, top_k, top_p, least, top, reference, whole, noise, SHIFT, LANES, RUNS, TILE, FAST
            )
        tl.store(out[0] + row, token.to(tl.int64))
        tl.store(out[1] + row, best)


@triton.jit
def sample_large_nucleus_kernel(
    logits_ptr,
    rows,
    limits,
    other,
    wide,
    sums_ptr,
    out,
    arrived_ptr,
    stride,
    vocab,
    num_slots,
    tiles,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
    RUNS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OTHER: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    # program (i, j) has `tiles` tiles of row i, from tile j * tiles on; the last of a row to arrive decides
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out[0] + row) >= 0:
        return
    slot = tl.load(rows[0] + row)
    if OTHER:
        other_ptr, is_adjusted = adjusted(slot, other)
        if is_adjusted:
            _wide_row(row, slot, other_ptr, rows, limits, wide, sums_ptr, out, arrived_ptr, vocab, num_slots, tiles, 0,
                      LANES, RUNS, TILE, STAGES, PROGRAMS, FAST)  # fmt: skip
            return
    _wide_row(row, slot, logits_ptr + row * stride, rows, limits, wide, sums_ptr, out, arrived_ptr, vocab, num_slots,
              tiles, SHIFT, LANES, RUNS, TILE, STAGES, PROGRAMS, FAST)  # fmt: skip
