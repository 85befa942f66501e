"""Device functions that the kernels of `sample_tokens` share: parameters of a row, ordered integers, powers, tiles.

A tile is RUNS x LANES x 8 tokens, in this order. The RUNS x 8 tokens of a lane are a span: lanes exchange nothing
before a span's results are stored. Powers are of 2: a weight is 2 ** (logit * scale - reference), one fused
multiply-add and one instruction.
"""

import triton
import triton.language as tl


@triton.jit
def load_params(slot, limits, vocab):
    """Returns whether the slot is greedy, log2(e) / temperature, top-k, top-p, min-p, and whether any limit is set."""
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, _, _ = limits
    real = slot >= 0
    temperature = tl.load(temperature_ptr + slot, mask=real, other=0.0)
    top_k = tl.load(top_k_ptr + slot, mask=real, other=1)
    top_p = tl.load(top_p_ptr + slot, mask=real, other=1.0)
    min_p = tl.load(min_p_ptr + slot, mask=real, other=0.0)
    greedy = temperature < 1e-5
    limited = (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)
    return greedy, 1.4426950408889634 / tl.where(greedy, 1.0, temperature), top_k, top_p, min_p, limited


@triton.jit
def load_counter(row, slot, rows, limits, num_slots):
    """Returns the Philox counter of a row: index, choice and the two words of the key."""
    _, index_ptr = rows
    _, _, _, _, key_ptr, choice_ptr = limits
    index = tl.load(index_ptr + row).to(tl.uint32)
    choice = tl.load(choice_ptr + slot).to(tl.uint32)
    key0 = tl.load(key_ptr + slot).to(tl.uint32)
    return index, choice, key0, tl.load(key_ptr + num_slots + slot).to(tl.uint32)


@triton.jit
def adjusted_row(slot, adjusted):
    """Returns the pointer to the slot's adjusted logits, and whether it has any."""
    which_ptr, adjusted_ptr, stride = adjusted
    which = tl.load(which_ptr + slot).to(tl.int64)
    return adjusted_ptr + tl.maximum(which, 0) * stride, which >= 0


@triton.jit
def to_ordered_int(x, shift):
    """float32 -> int32 in the same order, without the `shift` lowest bits; equal floats give equal integers."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> shift


@triton.jit
def from_ordered_int(key, shift):
    """The smallest float32 with this ordered integer."""
    key = key << shift
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def softmax_reference(x, scale):
    """The reference of the weights of logits up to x. It is finite, so that rows of -inf give no NaN."""
    return tl.maximum(x * scale, -3e38)


@triton.jit
def softmax_weight(x, scale, reference, FAST: tl.constexpr):
    """2 ** (x * scale - reference), 0 where that is below 1e-38."""
    return fast_exp2(tl.fma(x, scale, -reference), FAST)


@triton.jit
def fast_exp2(x, FAST: tl.constexpr):
    """2 ** x, by the hardware's approximate instruction if FAST."""
    if FAST:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def tile_tokens(tile, LANES: tl.constexpr, RUNS: tl.constexpr):
    """Ids of a tile's tokens [LANES, RUNS, 8]. In this order of dimensions Triton gives whole lanes to each thread."""
    lanes = tl.arange(0, LANES)[:, None, None]
    runs = tl.arange(0, RUNS)[None, :, None]
    return ((tile * RUNS + runs) * LANES + lanes) * 8 + tl.arange(0, 8)[None, None, :]


@triton.jit
def to_float(x, FAST: tl.constexpr):
    """Logits as float32. FAST: two bfloat16 with one instruction each."""
    if FAST and x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x], tl.float32, True, 2
        )
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def span_tokens(spans, LANES: tl.constexpr, RUNS: tl.constexpr):
    """spans [n] -> ids of their tokens [n, RUNS * 8]."""
    each = tl.arange(0, RUNS * 8)[None, :]
    tile, lane = (spans // LANES)[:, None], (spans % LANES)[:, None]
    return ((tile * RUNS + each // 8) * LANES + lane) * 8 + each % 8
