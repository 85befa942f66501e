"""The left operand of products of warp groups, in registers, of weights with codes of 4 bits: functions of a kernel in
Gluon.

Of each 8 inputs in a row, a thread of a warp group has two side by side in that operand. It reads their bytes at once,
from a tile that TMA has copied with a swizzle of 64 bytes: then the threads of a warp read from different banks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blockyard.kernels.quantized.number_pairs import less, of_pairs, times
from blockyard.kernels.quantized.unpack_tiles import scale_numbers


@gluon.jit
def of_group(tiles, start, NUMBER: gl.constexpr, OUT_TILE: gl.constexpr, L: gl.constexpr, E8M0: gl.constexpr):
    """Scales or zeros of the group NUMBER of a block as float32 [64, 1]."""
    loaded = tiles.slice(NUMBER * OUT_TILE + start, 64, 0).load(gl.SliceLayout(1, L))
    return gl.expand_dims(scale_numbers(loaded, E8M0), 1)


@gluon.jit
def _of_groups(
    tiles, start, FIRST: gl.constexpr, GROUP: gl.constexpr, OUT_TILE: gl.constexpr, L: gl.constexpr, E8M0: gl.constexpr
):
    """Scales or zeros of the 64 inputs from FIRST on as float32: [64, 1], or [64, 32] of pairs of inputs."""
    if GROUP % 128 == 0:
        return of_group(tiles, start, 0, OUT_TILE, L, E8M0)
    else:  # noqa: RET505, only one branch is compiled
        found = of_group(tiles, start, FIRST // GROUP, OUT_TILE, L, E8M0)
        pair = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, L)), 0)
        for i in gl.static_range(1, 64 // GROUP):
            other = of_group(tiles, start, FIRST // GROUP + i, OUT_TILE, L, E8M0)
            found = gl.where(pair < i * GROUP // 2, found, other)
        return found


@gluon.jit
def _scaled(
    pairs, scales, zeros, start, FIRST: gl.constexpr, L: gl.constexpr, A: gl.constexpr, OUT_TILE: gl.constexpr,
    GROUP: gl.constexpr, SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr, ZEROS: gl.constexpr,
    WHOLE: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """The left operand [64, 64] of pairs of numbers less zeros, times scales."""
    if SCALES:
        scale = _of_groups(scales, start, FIRST, GROUP, OUT_TILE, L, E8M0)
    if ZEROS:
        zero = _of_groups(zeros, start, FIRST, GROUP, OUT_TILE, L, False)
    if ZEROS and not WHOLE:
        first, second = of_pairs(pairs, DTYPE)
        first = first.to(gl.float32) - zero
        second = second.to(gl.float32) - zero
        if SCALES:
            first *= scale
            second *= scale
        first = first.to(DTYPE)
        second = second.to(DTYPE)
    else:
        if ZEROS:
            pairs = less(pairs, zero, DTYPE)
        if SCALES:
            pairs = times(pairs, scale, DTYPE, EXACT)
        first, second = of_pairs(pairs, DTYPE)
    return gl.convert_layout(gl.reshape(gl.join(first, second), [64, 64]), A, assert_trivial=True)


@gluon.jit
def left_operands(
    codes, scales, zeros, start, C: gl.constexpr, OUT_TILE: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr,
    E8M0: gl.constexpr, EXACT: gl.constexpr, ZEROS: gl.constexpr, WHOLE: gl.constexpr, DTYPE: gl.constexpr,
    ASM: gl.constexpr,
):  # fmt: skip
    """The left operands [64, 64] of both halves of a block, of the 64 outputs from `start` on. C: of their products.

    codes: uint16 [OUT_TILE, 32] in shared memory; scales and zeros: those of the block's groups, one after the other.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, C, 2)
    # of pairs of bytes as A is of numbers
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [0, 4], [0, 8], [0, 16]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 32]
    )
    two = codes.slice(start, 64, 0).load(L)
    low, high = gl.inline_asm_elementwise(ASM, "=r,=r,=r,=r,r", [two], dtype=(gl.int32, gl.int32), is_pure=True, pack=2)
    low = _scaled(low, scales, zeros, start, 0, L, A, OUT_TILE, GROUP, SCALES, E8M0, EXACT, ZEROS, WHOLE, DTYPE)
    high = _scaled(high, scales, zeros, start, 64, L, A, OUT_TILE, GROUP, SCALES, E8M0, EXACT, ZEROS, WHOLE, DTYPE)
    return low, high
