"""The three kernels of `draw_tokens`. What they share is handed on in tuples.

rows: slots [rows], index [rows]. limits: the fields of DrawParams. other: the index of each slot's row of adjusted
logits, below 0 none, and these rows. spans: the largest logit and the mass of each span. parts: the best value and its
token that each program of a row found.
"""

import triton
import triton.language as tl

from blockyard.kernels.draw_narrow import draw_narrow
from blockyard.kernels.draw_wide import best_noisy, least_kept, settle
from blockyard.kernels.philox_triton import exp_of


@triton.jit
def _settings(slot, limits, vocab):
    """Is greedy, 1 / temperature, top-k, top-p, min-p, has to be seen in spans."""
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, _, _ = limits
    real = slot >= 0
    temperature = tl.load(temperature_ptr + slot, mask=real, other=0.0)
    top_k = tl.load(top_k_ptr + slot, mask=real, other=1)
    top_p = tl.load(top_p_ptr + slot, mask=real, other=1.0)
    min_p = tl.load(min_p_ptr + slot, mask=real, other=0.0)
    greedy = temperature < 1e-5
    in_spans = greedy | (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)
    return greedy, 1.0 / tl.where(greedy, 1.0, temperature), top_k, top_p, min_p, in_spans


@triton.jit
def _counter(row, slot, rows, limits, num_slots):
    """Of the noise: index, choice and the words of the key."""
    _, index_ptr = rows
    _, _, _, _, key_ptr, choice_ptr = limits
    index = tl.load(index_ptr + row).to(tl.uint32)
    choice = tl.load(choice_ptr + slot).to(tl.uint32)
    key0 = tl.load(key_ptr + slot).to(tl.uint32)
    return index, choice, key0, tl.load(key_ptr + num_slots + slot).to(tl.uint32)


@triton.jit
def _adjusted(slot, other):
    """The slot's row of adjusted logits, and whether it has one."""
    which_ptr, other_ptr, other_stride = other
    which = tl.load(which_ptr + slot).to(tl.int64)
    return other_ptr + tl.maximum(which, 0) * other_stride, which >= 0


@triton.jit
def _scan_row(row, slot, row_ptr, rows, limits, spans, parts, vocab, num_slots, num_spans, tiles, SPAN: tl.constexpr,
              SPANS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    _greedy, scale, _top_k, _top_p, _min_p, in_spans = _settings(slot, limits, vocab)
    first = tl.program_id(1) * tiles
    if in_spans:
        top_ptr, mass_ptr = spans
        for tile in tl.range(first, tl.minimum(first + tiles, tl.cdiv(num_spans, SPANS)), num_stages=STAGES):
            numbers = tile * SPANS + tl.arange(0, SPANS)
            cols = numbers[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
            x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
            top = tl.max(x, 1)
            # the bound keeps a span of nothing but -inf from becoming NaN; NaN and +inf do become NaN
            mass = tl.sum(exp_of(x - tl.maximum(top, -3e38)[:, None], scale, FAST), 1)
            tl.store(top_ptr + row * num_spans + numbers, top, mask=numbers < num_spans)
            tl.store(mass_ptr + row * num_spans + numbers, mass, mask=numbers < num_spans)
    else:
        noise = _counter(row, slot, rows, limits, num_slots)
        each: tl.constexpr = SPANS * SPAN // TILE
        end = tl.minimum((first + tiles) * each, tl.cdiv(vocab, TILE))
        best, token = best_noisy(
            row_ptr, vocab, first * each, end, scale, float("-inf"), 0.0, noise, TILE, STAGES, FAST
        )
        _leave_part(parts, row, best, token)


@triton.jit
def scan_kernel(
    logits_ptr,
    rows,
    limits,
    other,
    spans,
    parts,
    stride,
    vocab,
    num_slots,
    num_spans,
    tiles,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    OTHER: tl.constexpr,
    FAST: tl.constexpr,
):
    # program (i, j) has `tiles` tiles of row i, from tile j * tiles on
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows[0] + row)
    if slot < 0:
        return
    if OTHER:
        other_ptr, is_adjusted = _adjusted(slot, other)
        if is_adjusted:
            _scan_row(row, slot, other_ptr, rows, limits, spans, parts, vocab, num_slots, num_spans, tiles,
                      SPAN, SPANS, TILE, STAGES, FAST)  # fmt: skip
            return
    _scan_row(row, slot, logits_ptr + row * stride, rows, limits, spans, parts, vocab, num_slots, num_spans, tiles,
              SPAN, SPANS, TILE, STAGES, FAST)  # fmt: skip


@triton.jit
def _choose_row(row, slot, row_ptr, rows, limits, spans, parts, lists, whole_ptr, vocab, num_slots, num_spans, programs,
                SHIFT: tl.constexpr, SPAN: tl.constexpr, ALL_SPANS: tl.constexpr, PROGRAMS: tl.constexpr,
                CHUNK: tl.constexpr, MOST_SPANS: tl.constexpr, MOST: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    """Best value and its token; token -1 and the largest logit where that is left to the third kernel."""
    best = tl.full([], 0.0, tl.float32)
    token = tl.full([], 0, tl.int32)
    greedy, scale, top_k, top_p, min_p, in_spans = _settings(slot, limits, vocab)
    if in_spans:
        top_ptr, mass_ptr = spans
        numbers = tl.arange(0, ALL_SPANS)
        real = numbers < num_spans
        tops = tl.load(top_ptr + row * num_spans + numbers, mask=real, other=float("-inf"))
        mass = tl.load(mass_ptr + row * num_spans + numbers, mask=real, other=0.0)
        top = tl.max(tops, 0)
        broken = tl.max(tl.where(mass < float("inf"), 0, 1), 0) > 0
        if broken | (top == float("-inf")):
            best = tl.where(broken, float("nan"), float("-inf"))
        elif greedy:
            span = tl.min(tl.where(tops == top, numbers, ALL_SPANS), 0)
            cols = span * SPAN + tl.arange(0, SPAN)
            x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
            token = tl.min(tl.where(x == top, cols, 0x7FFFFFFF), 0)
            best = top
        else:
            noise = _counter(row, slot, rows, limits, num_slots)
            mine = (lists[0] + row * MOST_SPANS, lists[1] + row * MOST, lists[2] + row * MOST)
            masses = mass * exp_of(tops - top, scale, FAST)
            whole = tl.sum(masses, 0)
            best, token, wide = draw_narrow(
                row_ptr, vocab, scale, top_k, top_p, min_p, numbers, real, tops, top, masses, whole, noise, mine, SHIFT,
                SPAN, CHUNK, MOST_SPANS, MOST, FAST,
            )  # fmt: skip
            tl.store(whole_ptr + row, whole)
            token = tl.where(wide, -1, token)
            best = tl.where(wide, top, best)
    else:
        best, token = _best_part(parts, row, programs, PROGRAMS)
    return best, token


@triton.jit
def choose_kernel(
    logits_ptr,
    rows,
    limits,
    other,
    spans,
    parts,
    lists,
    out,
    arrived_ptr,
    whole_ptr,
    stride,
    vocab,
    num_slots,
    num_spans,
    programs,
    SHIFT: tl.constexpr,
    SPAN: tl.constexpr,
    ALL_SPANS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
    MOST_SPANS: tl.constexpr,
    MOST: tl.constexpr,
    OTHER: tl.constexpr,
    FAST: tl.constexpr,
):
    # program i has row i
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows[0] + row)
    best = tl.full([], 0.0, tl.float32)
    token = tl.full([], 0, tl.int32)
    if slot >= 0:
        is_adjusted = slot < 0
        if OTHER:
            other_ptr, is_adjusted = _adjusted(slot, other)
            if is_adjusted:
                best, token = _choose_row(
                    row, slot, other_ptr, rows, limits, spans, parts, lists, whole_ptr, vocab, num_slots, num_spans,
                    programs, 0, SPAN, ALL_SPANS, PROGRAMS, CHUNK, MOST_SPANS, MOST, FAST,
                )  # fmt: skip
        if not is_adjusted:
            best, token = _choose_row(
                row, slot, logits_ptr + row * stride, rows, limits, spans, parts, lists, whole_ptr, vocab, num_slots,
                num_spans, programs, SHIFT, SPAN, ALL_SPANS, PROGRAMS, CHUNK, MOST_SPANS, MOST, FAST,
            )  # fmt: skip
    tl.store(arrived_ptr + row, 0)
    tl.store(out[0] + row, token.to(tl.int64))
    tl.store(out[1] + row, best)


@triton.jit
def _wide_row(row, slot, row_ptr, rows, limits, parts, out, arrived_ptr, whole_ptr, vocab, num_slots, tiles,
              SHIFT: tl.constexpr, TILE: tl.constexpr, WEIGHED: tl.constexpr, STAGES: tl.constexpr,
              PROGRAMS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    _greedy, scale, top_k, top_p, min_p, _in_spans = _settings(slot, limits, vocab)
    noise = _counter(row, slot, rows, limits, num_slots)
    top, whole = tl.load(out[1] + row), tl.load(whole_ptr + row)
    least = least_kept(top, scale, min_p)
    first, programs = tl.program_id(1) * tiles, tl.num_programs(1)
    end = tl.minimum(first + tiles, tl.cdiv(vocab, TILE))
    best, token = best_noisy(row_ptr, vocab, first, end, scale, least, top, noise, TILE, STAGES, FAST)
    _leave_part(parts, row, best, token)
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + row, 1) == programs - 1:
        best, token = _best_part(parts, row, programs, PROGRAMS)
        best, token = settle(
            best, token, row_ptr, vocab, scale, top_k, top_p, least, top, whole, noise, SHIFT, TILE, WEIGHED, STAGES,
            FAST,
        )  # fmt: skip
        tl.store(out[0] + row, token.to(tl.int64))
        tl.store(out[1] + row, best)


@triton.jit
def wide_kernel(
    logits_ptr,
    rows,
    limits,
    other,
    parts,
    out,
    arrived_ptr,
    whole_ptr,
    stride,
    vocab,
    num_slots,
    tiles,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    WEIGHED: tl.constexpr,
    STAGES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    OTHER: tl.constexpr,
    FAST: tl.constexpr,
):
    # program (i, j) has `tiles` tiles of row i, from tile j * tiles on; the last of a row to arrive puts it together
    row = tl.program_id(0).to(tl.int64)
    if tl.load(out[0] + row) >= 0:
        return
    slot = tl.load(rows[0] + row)
    if OTHER:
        other_ptr, is_adjusted = _adjusted(slot, other)
        if is_adjusted:
            _wide_row(row, slot, other_ptr, rows, limits, parts, out, arrived_ptr, whole_ptr, vocab, num_slots, tiles,
                      0, TILE, WEIGHED, STAGES, PROGRAMS, FAST)  # fmt: skip
            return
    _wide_row(row, slot, logits_ptr + row * stride, rows, limits, parts, out, arrived_ptr, whole_ptr, vocab, num_slots,
              tiles, SHIFT, TILE, WEIGHED, STAGES, PROGRAMS, FAST)  # fmt: skip


@triton.jit
def _leave_part(parts, row, best, token):
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(parts[0] + place, best)
    tl.store(parts[1] + place, token)


@triton.jit
def _best_part(parts, row, programs, PROGRAMS: tl.constexpr):
    """Of what the programs of a row found: NaN if one is, else the largest and the lowest token that has it."""
    places = tl.arange(0, PROGRAMS)
    inside = places < programs
    values = tl.load(parts[0] + row * programs + places, mask=inside, other=float("-inf"))
    ids = tl.load(parts[1] + row * programs + places, mask=inside, other=0x7FFFFFFF)
    best = tl.max(values, 0)
    token = tl.min(tl.where(values == best, ids, 0x7FFFFFFF), 0)
    token = tl.where(best > float("-inf"), token, 0)
    broken = tl.max(tl.where(values < float("inf"), 0, 1), 0) > 0
    return tl.where(broken, float("nan"), best), tl.where(broken, 0, token)
