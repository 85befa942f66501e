"""Device functions of sums over ranks: they write a tile to another rank's buffer, and wait for one in the own buffer.

Tiles are exchanged as integers of the size of their elements.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.all_reduce.peer_buffers import EMPTY_WORD

_EMPTY_WORD = tl.constexpr(EMPTY_WORD)
_EMPTY_HALF_WORD = tl.constexpr(-0x8000)


@triton.jit
def to_bits(x):
    """A tile as it is sent: -0.0 in 16 bits, or the float32 of EMPTY, becomes 0."""
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True)
        bits = tl.where(bits == _EMPTY_HALF_WORD, 0, bits)
    else:
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(bits == _EMPTY_WORD, 0, bits)
    return bits


@triton.jit
def buffer_of(addresses_ptr, peer, half, half_elements, BITS: tl.constexpr):
    """The pointer to a half of a rank's buffer."""
    place = tl.load(addresses_ptr + peer).to(tl.pointer_type(BITS))
    return tl.multiple_of(place, 16) + half * half_elements


@triton.jit
def take(place, inside, polls, failed_ptr, reported_ptr):
    """Waits until a tile of the own buffer has arrived, and empties its place. Returns its bits.

    After `polls` more reads it gives up and says so. Returns also how many of them are left: a program gives up once,
    and waits for none of its other tiles.
    """
    EMPTY: tl.constexpr = _EMPTY_HALF_WORD if place.dtype.element_ty == tl.int16 else _EMPTY_WORD
    left = polls
    bits = tl.load(place, mask=inside, other=0, volatile=True)
    missing = tl.max(((bits == EMPTY) & (left > 0)).to(tl.int32), 0)
    while missing > 0:  # the same for all threads, which `left` may not be
        left -= 1
        bits = tl.load(place, mask=inside, other=0, volatile=True)
        missing = tl.max(((bits == EMPTY) & (left > 0)).to(tl.int32), 0)
    if left <= 0:
        tl.store(failed_ptr, 1)
        tl.store(reported_ptr, 1)
    tl.store(place, tl.full(bits.shape, EMPTY, bits.dtype), mask=inside)
    return bits, left


@triton.jit
def begin_sum(
    weight_ptr, cols, size, num_sums_ptr, failed_ptr, most_polls,
    NORM: tl.constexpr, MOST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Loads the weight of the norm, which no kernel before this one writes, and counts the sum.

    Returns the weight, the half of the buffers that the sum uses, and how often `take` reads: not again after a
    failure. A program reads one word, and writes it and those of programs that other sums have, too.
    """
    if PDL:
        gdc_launch_dependents()
    weight = load_for_norm(weight_ptr + cols, cols < size, NORM)
    if PDL:
        gdc_wait()
    program, programs = tl.program_id(0), tl.num_programs(0)
    num_sums = tl.load(num_sums_ptr + program)
    polls = tl.where(tl.load(failed_ptr) == 0, most_polls, 0)
    tl.debug_barrier()  # each warp loads the number by itself: without this, one that is late reads what another stores
    at = tl.arange(0, MOST)
    tl.store(num_sums_ptr + at, num_sums + 1, mask=at % programs == program)
    return weight, num_sums & 1, polls


@triton.jit
def load_for_norm(place, inside, NORM: tl.constexpr):
    """What `finish_row` needs with NORM. Call it before a wait for other ranks, so that both take the time of one."""
    return tl.load(place, mask=inside, other=0.0).to(tl.float32) if NORM else 0.0


@triton.jit
def finish_row(
    total, residual, sum_ptr, weight, out_ptr, at, inside, size, eps, NORM: tl.constexpr,
):  # fmt: skip
    """Writes the sum of a row. With NORM: adds it to the residual, and writes that and its RMSNorm."""
    if NORM:
        rounded = (residual + total.to(tl.float32)).to(total.dtype)
        tl.store(sum_ptr, rounded, mask=inside)
        x = rounded.to(tl.float32)  # normalised as the next layer reads it, rounded
        scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        tl.store(out_ptr + at, x * scale * weight, mask=inside)
    else:
        tl.store(out_ptr + at, total, mask=inside)
