"""The first kernel of `sample_tokens`: all logits are read, once.

It leaves the largest logit of each span of tokens, the mass of what each program read, and, of rows without limits,
the spans that can hold the token with the largest noisy logit. Such a token has -log(u) <= limit * its weight for a
uniform u, and -log(1 - v) >= v: the words of Philox are compared as they are, and logarithms are left to those that
pass.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from blockyard.kernels.sampling.philox_triton import philox
from blockyard.kernels.sampling.sample_common import (
    adjusted,
    bounded,
    counter,
    power,
    settings,
    tile_tokens,
    to_float,
    weight,
)


@triton.jit
def four_of(x, LANES: tl.constexpr, RUNS: tl.constexpr):
    """[LANES, RUNS, 8] -> four of [LANES, RUNS, 2]: the tokens that share the words of a counter."""
    even, odd = tl.split(tl.reshape(x, [LANES, RUNS, 2, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def lane_best(x0, x1, x2, x3):
    """Largest of each lane [LANES]."""
    return tl.max(tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 2), 1)


@triton.jit
def _beside(groups, x, FAST: tl.constexpr):
    """`groups`, in the layout of x: what is computed from a range alone gets another, and all words were exchanged."""
    if FAST:
        groups = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,f", [groups, x], tl.int32, True, 1)
    return groups


@triton.jit
def _short(word, reach, FAST: tl.constexpr):
    """At most 1 where the word, as a fraction, is at most `reach`."""
    if FAST:
        upper = tl.inline_asm_elementwise("shf.r.wrap.b32 $0, $1, 0x7f, 9;", "=f,r", [word], tl.float32, True, 1)
    else:
        upper = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return upper - reach


@triton.jit
def sampled_limit(row_ptr, vocab, scale, CHANCES: tl.constexpr, LANES: tl.constexpr, FAST: tl.constexpr):
    """log2 of `limit` for weights without a reference: CHANCES by a low estimate of the row's mass.

    About CHANCES tokens pass, twice or more where the estimate is too low. It is a sample's mass, without that of the
    likeliest lane, which would count for all that was not seen.
    """
    lanes = tl.arange(0, LANES)
    step = tl.maximum(vocab // (LANES * 8), 1) * 8
    cols = (lanes * step)[:, None] + tl.arange(0, 8)[None, :]
    x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
    reference = bounded(tl.max(x, 1), scale)
    mass = tl.sum(weight(x, scale, reference[:, None], FAST), 1)
    top = tl.max(reference, 0)
    mass = mass * power(reference - top, FAST)
    most = tl.max(mass, 0)
    share = tl.maximum(vocab.to(tl.float32) / (LANES * 8), 1.0) * 0.5
    return tl.log2(CHANCES / tl.maximum((tl.sum(mass, 0) - most) * share + most, 1e-37)) - top


@triton.jit
def noisy_tile(row_ptr, tile, vocab, scale, limit, noise, LANES: tl.constexpr, RUNS: tl.constexpr,
               FAST: tl.constexpr):  # fmt: skip
    """[LANES] each: the largest logit, the reference of the weights, their sum, can the span hold the winner."""
    cols = tile_tokens(tile, LANES, RUNS)
    x = to_float(tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")), FAST)
    x0, x1, x2, x3 = four_of(x, LANES, RUNS)
    top = lane_best(x0, x1, x2, x3)
    reference = bounded(top, scale)
    other = reference[:, None, None]
    x0 = weight(x0, scale, other, FAST)
    x1 = weight(x1, scale, other, FAST)
    x2 = weight(x2, scale, other, FAST)
    x3 = weight(x3, scale, other, FAST)
    mass = tl.sum(tl.sum((x0 + x1) + (x2 + x3), 2), 1)
    reach = power(tl.minimum(reference + limit, 60.0), FAST)[:, None, None]
    groups = _beside(four_of(cols, LANES, RUNS)[0] >> 2, x0, FAST)
    w0, w1, w2, w3 = philox(groups, noise)
    low = tl.minimum(
        tl.minimum(_short(w0, x0 * reach, FAST), _short(w1, x1 * reach, FAST)),
        tl.minimum(_short(w2, x2 * reach, FAST), _short(w3, x3 * reach, FAST)),
    )
    return top, reference, mass, tl.min(tl.min(low, 2), 1) <= 1.0


@triton.jit
def _scan_row(row, slot, row_ptr, rows, limits, spans, parts, limit_ptr, vocab, num_slots, num_spans, tiles,
              CHANCES: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, FAST: tl.constexpr):  # fmt: skip
    greedy, scale, _top_k, _top_p, _min_p, limited = settings(slot, limits, vocab)
    first = tl.program_id(1) * tiles
    last = tl.minimum(first + tiles, tl.cdiv(num_spans, LANES))
    lanes = tl.arange(0, LANES)
    tops_ptr, hits_ptr = spans[0] + row * num_spans + lanes, spans[1] + row * num_spans + lanes
    references = tl.full([LANES], -3e38, tl.float32)
    masses = tl.zeros([LANES], tl.float32)
    if greedy:
        for tile in range(first, last):
            cols = tile_tokens(tile, LANES, RUNS)
            x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
            x0, x1, x2, x3 = four_of(x, LANES, RUNS)
            tl.store(tops_ptr + tile * LANES, lane_best(x0, x1, x2, x3))
            masses += tl.sum(tl.sum(tl.where(x < float("inf"), 0.0, float("nan")), 2), 1)
    elif limited:
        for tile in range(first, last):
            cols = tile_tokens(tile, LANES, RUNS)
            x = to_float(tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")), FAST)
            top = tl.max(tl.max(x, 2), 1)
            reference = bounded(top, scale)
            mass = tl.sum(tl.sum(weight(x, scale, reference[:, None, None], FAST), 2), 1)
            tl.store(tops_ptr + tile * LANES, top)
            higher = tl.maximum(references, reference)
            masses = masses * power(references - higher, FAST) + mass * power(reference - higher, FAST)
            references = higher
    else:
        noise = counter(row, slot, rows, limits, num_slots)
        limit = sampled_limit(row_ptr, vocab, scale, CHANCES, LANES, FAST)
        tl.store(limit_ptr + row, limit)
        for tile in range(first, last):
            top, reference, mass, hit = noisy_tile(row_ptr, tile, vocab, scale, limit, noise, LANES, RUNS, FAST)
            tl.store(tops_ptr + tile * LANES, top)
            tl.store(hits_ptr + tile * LANES, hit.to(tl.int8))
            higher = tl.maximum(references, reference)
            masses = masses * power(references - higher, FAST) + mass * power(reference - higher, FAST)
            references = higher
    top = tl.max(references, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(parts[0] + place, top)
    tl.store(parts[1] + place, tl.sum(masses * power(references - top, FAST), 0))


@triton.jit
def sample_scan_kernel(
    logits_ptr,
    rows,
    limits,
    other,
    spans,
    parts,
    limit_ptr,
    stride,
    vocab,
    num_slots,
    num_spans,
    tiles,
    CHANCES: tl.constexpr,
    LANES: tl.constexpr,
    RUNS: tl.constexpr,
    OTHER: tl.constexpr,
    FAST: tl.constexpr,
    PDL: tl.constexpr,
):
    # program (i, j) has `tiles` tiles of row i, from tile j * tiles on
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows[0] + row)
    if slot < 0:
        return
    if OTHER:
        other_ptr, is_adjusted = adjusted(slot, other)
        if is_adjusted:
            _scan_row(row, slot, other_ptr, rows, limits, spans, parts, limit_ptr, vocab, num_slots, num_spans, tiles,
                      CHANCES, LANES, RUNS, FAST)  # fmt: skip
            return
    _scan_row(row, slot, logits_ptr + row * stride, rows, limits, spans, parts, limit_ptr, vocab, num_slots, num_spans,
              tiles, CHANCES, LANES, RUNS, FAST)  # fmt: skip
