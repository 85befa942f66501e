"""Last two kernels of `sample_tokens`, for rows with limits that keep many tokens. Several programs share a row.

They do not search for the threshold. The noise kernel finds the spans that can hold a winner, given the row's mass. It
lists the winners of smaller and smaller sets: of all tokens, then of the tokens likelier than the last winner. The
sampled token is the first winner for which the tokens likelier than it have less mass than top-p. The last kernel
computes these masses in one read of the row; its last program to finish picks the token.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.sampling.sample_common import (
    adjusted_row,
    from_ordered_int,
    load_counter,
    load_params,
    softmax_reference,
    softmax_weight,
    tile_tokens,
    to_float,
    to_ordered_int,
)
from blockyard.kernels.sampling.sample_fallback import sample_fallback
from blockyard.kernels.sampling.sample_scan import scan_noisy_tile
from blockyard.kernels.sampling.sample_select import best_above, certain_above, min_p_bound
from blockyard.kernels.sampling.sample_small_nucleus import list_spans


@triton.jit
def _noise_row(
    row, slot, row_ptr, rows, limits, hits_ptr, lists, large_nucleus, out, semaphores_ptr, vocab, num_slots, num_spans,
    tiles,
    EXPECTED_CANDIDATES: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, ALL_SPANS: tl.constexpr,
    CHUNK: tl.constexpr, MAX_SPANS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Marks this program's candidate spans; the row's last program lists four winners of smaller and smaller sets."""
    _greedy, scale, _top_k, top_p, min_p, _limited = load_params(slot, limits, vocab)
    noise = load_counter(row, slot, rows, limits, num_slots)
    max_logit = tl.load(out[1] + row)
    reference = softmax_reference(max_logit, scale)
    # the expected number among the tokens that top-p keeps; the mass that min-p rules out is not known
    limit = tl.log2(EXPECTED_CANDIDATES / (tl.load(large_nucleus[2] + row) * tl.maximum(top_p, 0.01))) - reference
    first, programs = tl.program_id(1) * tiles, tl.num_programs(1)
    hits_ptr += row * num_spans
    lanes = tl.arange(0, LANES)
    for tile in range(first, tl.minimum(first + tiles, tl.cdiv(num_spans, LANES))):
        _top, _reference, _mass, hit = scan_noisy_tile(row_ptr, tile, vocab, scale, limit, noise, LANES, RUNS, FAST)
        tl.store(hits_ptr + tile * LANES + lanes, hit.to(tl.int8))
    tl.debug_barrier()
    if tl.atomic_add(semaphores_ptr + row * 2, 1) == programs - 1:
        spans_ptr = lists[0] + row * MAX_SPANS
        span_ids = tl.arange(0, ALL_SPANS)
        hits = tl.load(hits_ptr + span_ids, mask=span_ids < num_spans, other=0) > 0
        num = list_spans(spans_ptr, hits, span_ids, MAX_SPANS)
        certain = certain_above(limit, reference, num, MAX_SPANS)
        num = tl.minimum(num, MAX_SPANS)
        min_logit = min_p_bound(max_logit, scale, min_p)
        floor = tl.full([], float("-inf"), tl.float32)
        token = tl.full([], 0, tl.int32)
        turn = 0
        while turn < 4:
            best, token, floor = best_above(
                row_ptr, spans_ptr, num, floor, min_logit, max_logit, scale, vocab, noise, LANES, RUNS, CHUNK, FAST
            )
            known = best >= certain
            tl.store(large_nucleus[0] + row * 4 + turn, tl.where(known, best, float("-inf")))
            tl.store(large_nucleus[1] + row * 4 + turn, token)
            floor = tl.where(
                known, floor, float("inf")
            )  # a winner of a smaller set has a smaller value: none is certain
            turn += 1


@triton.jit
def sample_noise_kernel(
    logits_ptr, rows, limits, adjusted, hits_ptr, lists, large_nucleus, out, semaphores_ptr, stride, vocab, num_slots,
    num_spans, tiles,
    EXPECTED_CANDIDATES: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, ALL_SPANS: tl.constexpr,
    CHUNK: tl.constexpr, MAX_SPANS: tl.constexpr, ADJUSTED: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): `tiles` tiles of row i, from tile j * tiles on
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out[0] + row) != -1:
        return
    slot = tl.load(rows[0] + row)
    if ADJUSTED:
        adjusted_ptr, is_adjusted = adjusted_row(slot, adjusted)
        if is_adjusted:
            _noise_row(
                row, slot, adjusted_ptr, rows, limits, hits_ptr, lists, large_nucleus, out, semaphores_ptr, vocab,
                num_slots, num_spans, tiles, EXPECTED_CANDIDATES, LANES, RUNS, ALL_SPANS, CHUNK, MAX_SPANS, FAST,
            )  # fmt: skip
            return
    _noise_row(
        row, slot, logits_ptr + row * stride, rows, limits, hits_ptr, lists, large_nucleus, out, semaphores_ptr, vocab,
        num_slots, num_spans, tiles, EXPECTED_CANDIDATES, LANES, RUNS, ALL_SPANS, CHUNK, MAX_SPANS, FAST,
    )  # fmt: skip


@triton.jit
def _at_least(x, min_logit, FAST: tl.constexpr):
    """1.0 where x is at least `min_logit`, else 0.0."""
    if FAST:  # one instruction in place of two
        ones = tl.inline_asm_elementwise("set.ge.f32.f32 $0, $1, $2;", "=f,f,f", [x, min_logit], tl.float32, True, 1)
    else:
        ones = (x >= min_logit).to(tl.float32)
    return ones


@triton.jit
def _next_above(row_ptr, token, SHIFT: tl.constexpr):
    """The smallest logit above a token's."""
    return from_ordered_int(to_ordered_int(tl.load(row_ptr + token).to(tl.float32), SHIFT) + 1, SHIFT)


@triton.jit
def _weigh_row(
    row, slot, row_ptr, rows, limits, large_nucleus, sums_ptr, out, semaphores_ptr, vocab, num_slots, tiles,
    SHIFT: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Adds up the mass above each winner; the last program of the row picks the first winner that top-p keeps."""
    _greedy, scale, top_k, top_p, min_p, _limited = load_params(slot, limits, vocab)
    noise = load_counter(row, slot, rows, limits, num_slots)
    max_logit, row_mass = tl.load(out[1] + row), tl.load(large_nucleus[2] + row)
    reference = softmax_reference(max_logit, scale)
    min_logit = min_p_bound(max_logit, scale, min_p)
    first, programs = tl.program_id(1) * tiles, tl.num_programs(1)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], -1, tl.int32)
    last = True
    if tl.load(out[0] + row) == -1:
        values, tokens = large_nucleus[0] + row * 4, large_nucleus[1] + row * 4
        t0 = _next_above(row_ptr, tl.load(tokens), SHIFT)
        t1 = _next_above(row_ptr, tl.load(tokens + 1), SHIFT)
        t2 = _next_above(row_ptr, tl.load(tokens + 2), SHIFT)
        t3 = tl.where(min_p > 0, min_logit, _next_above(row_ptr, tl.load(tokens + 3), SHIFT))
        m0 = tl.zeros([LANES], tl.float32)
        m1 = tl.zeros([LANES], tl.float32)
        m2 = tl.zeros([LANES], tl.float32)
        m3 = tl.zeros([LANES], tl.float32)
        end = tl.minimum(first + tiles, tl.cdiv(vocab, LANES * RUNS * 8))
        for back in tl.range(0, end - first, num_stages=STAGES):
            cols = tile_tokens(
                end - 1 - back, LANES, RUNS
            )  # tiles that the scan read last may still be in the L2 cache
            x = to_float(tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")), FAST)
            share = softmax_weight(x, scale, reference, FAST)
            m0 += tl.sum(tl.sum(_at_least(x, t0, FAST) * share, 2), 1)
            m1 += tl.sum(tl.sum(_at_least(x, t1, FAST) * share, 2), 1)
            m2 += tl.sum(tl.sum(_at_least(x, t2, FAST) * share, 2), 1)
            m3 += tl.sum(tl.sum(_at_least(x, t3, FAST) * share, 2), 1)
        place = sums_ptr + (row * programs + tl.program_id(1)) * 4
        tl.store(place, tl.sum(m0, 0))
        tl.store(place + 1, tl.sum(m1, 0))
        tl.store(place + 2, tl.sum(m2, 0))
        tl.store(place + 3, tl.sum(m3, 0))
        tl.debug_barrier()
        last = tl.atomic_add(semaphores_ptr + row * 2 + 1, 1) == programs - 1
        if last:
            each = tl.arange(0, PROGRAMS)
            turn = 0
            left = row_mass
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
            best, token = sample_fallback(
                row_ptr, vocab, scale, top_k, top_p, min_logit, max_logit, reference, row_mass, noise, SHIFT, LANES,
                RUNS, TILE, FAST,
            )  # fmt: skip
        tl.store(out[0] + row, token.to(tl.int64))
        tl.store(out[1] + row, best)


@triton.jit
def sample_large_nucleus_kernel(
    logits_ptr, rows, limits, adjusted, large_nucleus, sums_ptr, out, semaphores_ptr, stride, vocab, num_slots, tiles,
    SHIFT: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr, ADJUSTED: tl.constexpr, FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): `tiles` tiles of row i, from tile j * tiles on; the last program of a row to arrive decides
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out[0] + row) >= 0:
        return
    slot = tl.load(rows[0] + row)
    if ADJUSTED:
        adjusted_ptr, is_adjusted = adjusted_row(slot, adjusted)
        if is_adjusted:
            _weigh_row(
                row, slot, adjusted_ptr, rows, limits, large_nucleus, sums_ptr, out, semaphores_ptr, vocab, num_slots,
                tiles, 0, LANES, RUNS, TILE, STAGES, PROGRAMS, FAST,
            )  # fmt: skip
            return
    _weigh_row(
        row, slot, logits_ptr + row * stride, rows, limits, large_nucleus, sums_ptr, out, semaphores_ptr, vocab,
        num_slots, tiles, SHIFT, LANES, RUNS, TILE, STAGES, PROGRAMS, FAST,
    )  # fmt: skip
