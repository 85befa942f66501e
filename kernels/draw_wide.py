"""The third kernel of `draw_tokens`, for rows whose limits keep many tokens.

The threshold is not looked for. The second kernel has drawn winners of smaller and smaller sets, each of the tokens
that are likelier than the last: the first of them that what is likelier leaves room for is the winner among what
top-p keeps. What is likelier than each is weighed by several programs a row, in one read. A row for which no winner
is known so is drawn by one program alone: rare, and slow.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.draw_choose import least_kept
from blockyard.kernels.draw_common import (
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
from blockyard.kernels.philox_triton import gumbel_run


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
def _settle(row_ptr, vocab, scale, top_k, top_p, least, top, reference, whole, noise, SHIFT: tl.constexpr,
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
        last = tl.atomic_add(arrived_ptr + row, 1) == programs - 1
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
            best, token = _settle(
                row_ptr, vocab, scale, top_k, top_p, least, top, reference, whole, noise, SHIFT, LANES, RUNS, TILE, FAST
            )
        tl.store(out[0] + row, token.to(tl.int64))
        tl.store(out[1] + row, best)


@triton.jit
def wide_kernel(
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
    OVERLAP: tl.constexpr,
):
    # program (i, j) has `tiles` tiles of row i, from tile j * tiles on; the last of a row to arrive decides
    if OVERLAP:
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
