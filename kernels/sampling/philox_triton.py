"""The noise of `philox_gumbel` for Triton kernels: the same words, the same Gumbel values up to float32 rounding.

FAST, on a GPU, uses the hardware's log2, which Triton's interpreter does not have.
"""

import triton
import triton.language as tl


@triton.jit
def philox(group, counter):
    """group [n] integers, counter (index, choice and the words of the key, uint32 scalars) -> four words, uint32 [n].

    In the first two rounds, products of scalars are computed as scalars.
    """
    index, choice, key0, key1 = counter
    even = group.to(tl.uint32).to(tl.uint64) * 0xD2511F53
    alone = choice.to(tl.uint64) * 0xCD9E8D57
    c0_alone, c1_alone = (alone >> 32).to(tl.uint32) ^ index ^ key0, alone.to(tl.uint32)
    c2, c3 = (even >> 32).to(tl.uint32) ^ key1, even.to(tl.uint32)
    key0 += 0x9E3779B9
    key1 += 0xBB67AE85
    alone = c0_alone.to(tl.uint64) * 0xD2511F53
    odd = c2.to(tl.uint64) * 0xCD9E8D57
    c0, c1 = (odd >> 32).to(tl.uint32) ^ (c1_alone ^ key0), odd.to(tl.uint32)
    c2 = c3 ^ ((alone >> 32).to(tl.uint32) ^ key1)
    c3 = tl.zeros_like(c0) + alone.to(tl.uint32)
    for _ in tl.static_range(8):
        key0 += 0x9E3779B9
        key1 += 0xBB67AE85
        even = c0.to(tl.uint64) * 0xD2511F53
        odd = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (odd >> 32).to(tl.uint32) ^ c1 ^ key0
        c2 = (even >> 32).to(tl.uint32) ^ c3 ^ key1
        c1, c3 = odd.to(tl.uint32), even.to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def gumbel(word, FAST: tl.constexpr):
    """uint32 words -> float32 noise, as `philox_gumbel.to_gumbel`.

    FAST: a series for -log1p(-v) up to 1/16 (its next term is below 2e-7 of it), then the hardware's logarithm, whose
    error there is 2e-6 of it at most. Else log(u) * v / (1 - u) with the rounded u = 1 - v (Kahan).
    """
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    u = 1.0 - v
    if FAST:
        series = v * (1 + v * (0.5 + v * (0.33333334 + v * (0.25 + v * 0.2))))
        rare = tl.where(v < 0.0625, series, -0.6931471805599453 * _log2(u))
        noise = -0.6931471805599453 * _log2(rare)
    else:
        lost = u == 1.0
        noise = -tl.log(-tl.where(lost, -v, tl.log(u) * (v / tl.where(lost, 1.0, 1.0 - u))))
    return noise


@triton.jit
def _log2(x):
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def gumbel_at(tokens, counter, FAST: tl.constexpr):
    """tokens [n] integers -> float32 [n]: the noise of each token, in any order."""
    w0, w1, w2, w3 = philox(tokens >> 2, counter)
    lane = tokens & 3
    return gumbel(tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3)), FAST)


@triton.jit
def gumbel_run(first, counter, COUNT: tl.constexpr, FAST: tl.constexpr):
    """float32 [COUNT]: the noise of the tokens from `first` on; both are multiples of 4."""
    w0, w1, w2, w3 = philox((first >> 2) + tl.arange(0, COUNT // 4), counter)
    return gumbel(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [COUNT]), FAST)
