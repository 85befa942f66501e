"""First kernel of `sample_tokens`: reads all logits once.

It stores the largest logit of each span of tokens, the probability mass of what each program read, and, for rows
without limits, the spans that can hold the token with the largest perturbed logit (Gumbel-max). Such a token has
-log(u) <= limit * its weight for a uniform u, and -log(1 - v) >= v. So the words of Philox are compared with weights
directly, and logarithms are taken only of the tokens that pass.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from blockyard.kernels.sampling.philox_triton import philox
from blockyard.kernels.sampling.sample_common import (
    adjusted_row,
    fast_exp2,
    load_counter,
    load_params,
    softmax_reference,
    softmax_weight,
    tile_tokens,
    to_float,
)


@triton.jit
def split_by_word(x, LANES: tl.constexpr, RUNS: tl.constexpr):
    """[LANES, RUNS, 8] -> four of [LANES, RUNS, 2]: tokens i of each have word i of a Philox counter."""
    even, odd = tl.split(tl.reshape(x, [LANES, RUNS, 2, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def lane_max(x0, x1, x2, x3):
    """The largest value of each lane, [LANES]."""
    return tl.max(tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 2), 1)


@triton.jit
def _in_layout_of(groups, x, FAST: tl.constexpr):
    """`groups` in the register layout of x. Values computed from a range alone get another layout, and then Triton
    exchanges all words between threads.
    """
    if FAST:
        groups = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,f", [groups, x], tl.int32, True, 1)
    return groups


@triton.jit
def _word_minus_reach(word, reach, FAST: tl.constexpr):
    """A value of at most 1 where the word, as a fraction of 2**32, is at most `reach`."""
    if FAST:
        upper = tl.inline_asm_elementwise("shf.r.wrap.b32 $0, $1, 0x7f, 9;", "=f,r", [word], tl.float32, True, 1)
    else:
        upper = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    return upper - reach


@triton.jit
def estimate_limit(row_ptr, vocab, scale, EXPECTED_CANDIDATES: tl.constexpr, LANES: tl.constexpr, FAST: tl.constexpr):
    """log2 of `limit` for weights without a reference: EXPECTED_CANDIDATES over a low estimate of the row's mass.

    About EXPECTED_CANDIDATES tokens pass, twice as many or more where the estimate is too low. The estimate is the mass
    of a sample of tokens. The sample's likeliest lane is not scaled up to the vocabulary, only added.
    """
    lanes = tl.arange(0, LANES)
    step = tl.maximum(vocab // (LANES * 8), 1) * 8
    cols = (lanes * step)[:, None] + tl.arange(0, 8)[None, :]
    x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
    reference = softmax_reference(tl.max(x, 1), scale)
    mass = tl.sum(softmax_weight(x, scale, reference[:, None], FAST), 1)
    max_logit = tl.max(reference, 0)
    mass = mass * fast_exp2(reference - max_logit, FAST)
    most = tl.max(mass, 0)
    share = tl.maximum(vocab.to(tl.float32) / (LANES * 8), 1.0) * 0.5
    return tl.log2(EXPECTED_CANDIDATES / tl.maximum((tl.sum(mass, 0) - most) * share + most, 1e-37)) - max_logit


@triton.jit
def scan_noisy_tile(
    row_ptr, tile, vocab, scale, limit, noise,
    LANES: tl.constexpr, RUNS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Returns for each lane, [LANES]: the largest logit, the reference of the weights, their sum, and whether the span
    can hold the winner.
    """
    cols = tile_tokens(tile, LANES, RUNS)
    x = to_float(tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")), FAST)
    x0, x1, x2, x3 = split_by_word(x, LANES, RUNS)
    max_logit = lane_max(x0, x1, x2, x3)
    reference = softmax_reference(max_logit, scale)
    other = reference[:, None, None]
    x0 = softmax_weight(x0, scale, other, FAST)
    x1 = softmax_weight(x1, scale, other, FAST)
    x2 = softmax_weight(x2, scale, other, FAST)
    x3 = softmax_weight(x3, scale, other, FAST)
    mass = tl.sum(tl.sum((x0 + x1) + (x2 + x3), 2), 1)
    reach = fast_exp2(tl.minimum(reference + limit, 60.0), FAST)[:, None, None]
    groups = _in_layout_of(split_by_word(cols, LANES, RUNS)[0] >> 2, x0, FAST)
    w0, w1, w2, w3 = philox(groups, noise)
    low = tl.minimum(
        tl.minimum(_word_minus_reach(w0, x0 * reach, FAST), _word_minus_reach(w1, x1 * reach, FAST)),
        tl.minimum(_word_minus_reach(w2, x2 * reach, FAST), _word_minus_reach(w3, x3 * reach, FAST)),
    )
    return max_logit, reference, mass, tl.min(tl.min(low, 2), 1) <= 1.0


@triton.jit
def _scan_row(
    row, slot, row_ptr, rows, limits, spans, parts, limit_ptr, vocab, num_slots, num_spans, tiles,
    EXPECTED_CANDIDATES: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Scans this program's tiles of a row and stores spans' maxima, candidates and mass."""
    greedy, scale, _top_k, _top_p, _min_p, limited = load_params(slot, limits, vocab)
    first = tl.program_id(1) * tiles
    last = tl.minimum(first + tiles, tl.cdiv(num_spans, LANES))
    lanes = tl.arange(0, LANES)
    span_max_ptr, hits_ptr = spans[0] + row * num_spans + lanes, spans[1] + row * num_spans + lanes
    references = tl.full([LANES], -3e38, tl.float32)
    masses = tl.zeros([LANES], tl.float32)
    if greedy:
        for tile in range(first, last):
            cols = tile_tokens(tile, LANES, RUNS)
            x = tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
            x0, x1, x2, x3 = split_by_word(x, LANES, RUNS)
            tl.store(span_max_ptr + tile * LANES, lane_max(x0, x1, x2, x3))
            masses += tl.sum(tl.sum(tl.where(x < float("inf"), 0.0, float("nan")), 2), 1)
    elif limited:
        for tile in range(first, last):
            cols = tile_tokens(tile, LANES, RUNS)
            x = to_float(tl.load(row_ptr + cols, mask=cols < vocab, other=float("-inf")), FAST)
            max_logit = tl.max(tl.max(x, 2), 1)
            reference = softmax_reference(max_logit, scale)
            mass = tl.sum(tl.sum(softmax_weight(x, scale, reference[:, None, None], FAST), 2), 1)
            tl.store(span_max_ptr + tile * LANES, max_logit)
            higher = tl.maximum(references, reference)
            masses = masses * fast_exp2(references - higher, FAST) + mass * fast_exp2(reference - higher, FAST)
            references = higher
    else:
        noise = load_counter(row, slot, rows, limits, num_slots)
        limit = estimate_limit(row_ptr, vocab, scale, EXPECTED_CANDIDATES, LANES, FAST)
        tl.store(limit_ptr + row, limit)
        for tile in range(first, last):
            max_logit, reference, mass, hit = scan_noisy_tile(
                row_ptr, tile, vocab, scale, limit, noise, LANES, RUNS, FAST
            )
            tl.store(span_max_ptr + tile * LANES, max_logit)
            tl.store(hits_ptr + tile * LANES, hit.to(tl.int8))
            higher = tl.maximum(references, reference)
            masses = masses * fast_exp2(references - higher, FAST) + mass * fast_exp2(reference - higher, FAST)
            references = higher
    max_logit = tl.max(references, 0)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(parts[0] + place, max_logit)
    tl.store(parts[1] + place, tl.sum(masses * fast_exp2(references - max_logit, FAST), 0))


@triton.jit
def sample_scan_kernel(
    logits_ptr, rows, limits, adjusted, spans, parts, limit_ptr, stride, vocab, num_slots, num_spans, tiles,
    EXPECTED_CANDIDATES: tl.constexpr, LANES: tl.constexpr, RUNS: tl.constexpr, ADJUSTED: tl.constexpr,
    FAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): `tiles` tiles of row i, from tile j * tiles on
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows[0] + row)
    if slot < 0:
        return
    if ADJUSTED:
        adjusted_ptr, is_adjusted = adjusted_row(slot, adjusted)
        if is_adjusted:
            _scan_row(
                row, slot, adjusted_ptr, rows, limits, spans, parts, limit_ptr, vocab, num_slots, num_spans, tiles,
                EXPECTED_CANDIDATES, LANES, RUNS, FAST,
            )  # fmt: skip
            return
    _scan_row(
        row, slot, logits_ptr + row * stride, rows, limits, spans, parts, limit_ptr, vocab, num_slots, num_spans,
        tiles, EXPECTED_CANDIDATES, LANES, RUNS, FAST,
    )  # fmt: skip
