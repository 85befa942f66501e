"""Arithmetic of pairs of 16-bit floats, of which a thread has two in 32 bits: functions of kernels in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def twice(value, DTYPE: gl.constexpr):
    """A float in DTYPE, two times in 32 bits."""
    bits = value.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (bits << 16)


@gluon.jit
def of_pairs(pairs, DTYPE: gl.constexpr):
    """The first and the second number of pairs in 32 bits."""
    first = pairs.to(gl.int16).to(DTYPE, bitcast=True)
    return first, (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True)


@gluon.jit
def less(pairs, zero, DTYPE: gl.constexpr):
    """Pairs of numbers less whole zeros, which is exact."""
    ASM: gl.constexpr = "sub.rn.bf16x2 $0, $1, $2;" if gl.bfloat16 == DTYPE else "sub.rn.f16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [pairs, twice(zero, DTYPE)], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def times_pair(pairs, factors, DTYPE: gl.constexpr):
    """Pairs of numbers times pairs of factors, each product rounded."""
    ASM: gl.constexpr = "mul.rn.bf16x2 $0, $1, $2;" if gl.bfloat16 == DTYPE else "mul.rn.f16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [pairs, factors], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def times(pairs, scale, DTYPE: gl.constexpr, EXACT: gl.constexpr):
    """Pairs of numbers times scales. EXACT: DTYPE has all scales; else they are the sum of two numbers in DTYPE."""
    most = twice(scale, DTYPE)
    if EXACT:
        return times_pair(pairs, most, DTYPE)
    else:  # noqa: RET505, only one branch is compiled
        TWO: gl.constexpr = (
            "{ .reg .b32 less; mul.rn.bf16x2 less, $1, $3; fma.rn.bf16x2 $0, $1, $2, less; }"
            if gl.bfloat16 == DTYPE
            else "{ .reg .b32 less; mul.rn.f16x2 less, $1, $3; fma.rn.f16x2 $0, $1, $2, less; }"
        )
        rest = twice(scale - scale.to(DTYPE).to(gl.float32), DTYPE)
        return gl.inline_asm_elementwise(TWO, "=r,r,r,r", [pairs, most, rest], dtype=gl.int32, is_pure=True, pack=1)
