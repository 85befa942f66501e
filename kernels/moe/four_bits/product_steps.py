"""The steps of a product on tensor cores of weights with 4 bits: loads some steps ahead, and sums of all warps.

The weight is the left operand, made in registers (`operands`). The warps of a program take the blocks of inputs in turn
and add their sums at the end, so that no step waits for another warp. A pair's sum has the same terms in the same order
beside any other pairs. Scales that the dtype of x cannot hold are the sum of two numbers of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from blockyard.kernels.moe.four_bits.operands import (
    along_2,
    block_of,
    code_layout,
    inverse_length,
    left_operand,
    load_factors,
    load_norm,
    load_words,
    load_x,
    right_operand,
    weight_rows,
)
from blockyard.kernels.quantized.unpack_tiles import scale_numbers


@gluon.jit
def _load_step(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, step, row, expert, experts_ptr, start, inner, outs,
    SIZE: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, ZEROS: gl.constexpr, TOP_K: gl.constexpr,
    GATE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, L: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """What is read of a weight for a step: words, then scales and zeros, if words have some of their own; at last the
    inputs, if they are few. More would take so many registers that fewer programs run at a time."""
    loaded = (load_words(codes_ptr, step, expert, experts_ptr, start, inner, outs, SIZE, TOP_K, GATE, W, R, L),)
    if SCALES and GROUP % 128 != 0:
        scale = load_factors(
            scales_ptr, step, expert, experts_ptr, start, inner, outs, SIZE, GROUP, TOP_K, GATE, W, R, L
        )
        loaded = loaded + (scale,)  # type: ignore[assignment]  # noqa: RUF005
    if ZEROS:
        zero = load_factors(zeros_ptr, step, expert, experts_ptr, start, inner, outs, SIZE, GROUP, TOP_K, GATE, W, R, L)
        loaded = loaded + (zero,)  # type: ignore[assignment]  # noqa: RUF005
    if X.shape[3] == 8:
        loaded = loaded + (load_x(x_ptr, row, step, experts_ptr, SIZE, TOP_K, W, X),)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@gluon.jit
def _sum_factors(
    scales_ptr, row_scales_ptr, scale_ptr, step, expert, experts_ptr, start, inner, outs,
    SIZE: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, E8M0: gl.constexpr, ROW_SCALES: gl.constexpr,
    SCALE: gl.constexpr, TOP_K: gl.constexpr, GATE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """What multiplies the sums of a step, [W, R, 1] in float32: scales of whole blocks; with TOP_K those of rows and of
    routing, too."""
    S: gl.constexpr = gl.SliceLayout(2, C)
    BLOCKS: gl.constexpr = (SIZE + 127) // 128
    block, own, k = block_of(step, along_2(W, 0, S), expert, experts_ptr, BLOCKS, W, TOP_K)
    row = weight_rows(along_2(R, 1, S), start, inner, GATE)
    block = gl.minimum(block, BLOCKS - 1)
    factor = gl.full([W, R], 1.0, gl.float32, S)
    if SCALES and GROUP % 128 == 0:
        GROUPS: gl.constexpr = (SIZE + GROUP - 1) // GROUP
        place = scales_ptr + own * outs * GROUPS + (row * GROUPS + block * 128 // GROUP)
        factor *= scale_numbers(gl.load(place), E8M0)
    if TOP_K and ROW_SCALES:
        factor *= gl.load(row_scales_ptr + own * outs + row).to(gl.float32)
    if TOP_K and SCALE:
        factor *= gl.load(scale_ptr + k)
    return gl.expand_dims(factor, 2)


@gluon.jit
def _add_step(
    total, loaded, x_ptr, norm_ptr, scales_ptr, row_scales_ptr, scale_ptr, row, step, expert, experts_ptr, start, inner,
    outs,
    SIZE: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr,
    ZEROS: gl.constexpr, NORM: gl.constexpr, ROW_SCALES: gl.constexpr, SCALE: gl.constexpr, TOP_K: gl.constexpr,
    GATE: gl.constexpr, ASM: gl.constexpr, W: gl.constexpr, R: gl.constexpr, N: gl.constexpr, C: gl.constexpr,
    X: gl.constexpr,
):  # fmt: skip
    """total [W, R, N] and the products of what `_load_step` has loaded."""
    x = loaded[-1] if N == 8 else load_x(x_ptr, row, step, experts_ptr, SIZE, TOP_K, W, X)
    if NORM:
        x = (x * load_norm(norm_ptr, step, SIZE, W, X)).to(x_ptr.dtype.element_ty)
    left = left_operand(
        loaded[0], loaded[1:], SCALES and GROUP % 128 != 0, E8M0, EXACT, ZEROS, x_ptr.dtype.element_ty, ASM, W, R, C
    )
    right = right_operand(x, W, N, C)
    if TOP_K or (SCALES and GROUP % 128 == 0):
        part = mma_v2(left, right, gl.zeros_like(total))
        return total + part * _sum_factors(
            scales_ptr, row_scales_ptr, scale_ptr, step, expert, experts_ptr, start, inner, outs,
            SIZE, GROUP, SCALES, E8M0, ROW_SCALES, SCALE, TOP_K, GATE, W, R, C,
        )  # fmt: skip
    else:  # noqa: RET505, only one branch is compiled
        return mma_v2(left, right, total)


@gluon.jit
def add_steps(
    x_ptr, norm_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, scale_ptr, row, expert, experts_ptr, start,
    inner, outs, first_row, eps,
    SIZE: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr,
    ZEROS: gl.constexpr, NORM: gl.constexpr, ROW_SCALES: gl.constexpr, SCALE: gl.constexpr, TOP_K: gl.constexpr,
    GATE: gl.constexpr, ASM: gl.constexpr, W: gl.constexpr, R: gl.constexpr, N: gl.constexpr, AHEAD: gl.constexpr,
    X: gl.constexpr,
):  # fmt: skip
    """The sums of a program's rows of a weight and columns, float32 [R, N]. With TOP_K of that many experts. With NORM
    all columns are of row `first_row`."""
    C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
    L: gl.constexpr = code_layout(W, R)
    BLOCKS: gl.constexpr = (SIZE + 127) // 128
    STEPS: gl.constexpr = (BLOCKS * (TOP_K if TOP_K else 1) + W - 1) // W
    total = gl.zeros([W, R, N], gl.float32, C)
    waiting = ()
    for step in gl.static_range(min(AHEAD, STEPS)):
        one = _load_step(
            x_ptr, codes_ptr, scales_ptr, zeros_ptr, step, row, expert, experts_ptr, start, inner, outs,
            SIZE, GROUP, SCALES, ZEROS, TOP_K, GATE, W, R, L, X,
        )  # fmt: skip
        waiting = waiting + (one,)  # type: ignore[assignment]  # noqa: RUF005
    length = 1.0
    if NORM:  # while the first steps are loaded
        length = inverse_length(x_ptr, first_row, eps, SIZE, W)
    for step in range(STEPS - min(AHEAD, STEPS)):
        one = _load_step(
            x_ptr, codes_ptr, scales_ptr, zeros_ptr, step + AHEAD, row, expert, experts_ptr, start, inner, outs,
            SIZE, GROUP, SCALES, ZEROS, TOP_K, GATE, W, R, L, X,
        )  # fmt: skip
        total = _add_step(
            total, waiting[0], x_ptr, norm_ptr, scales_ptr, row_scales_ptr, scale_ptr, row, step, expert, experts_ptr,  # type: ignore[misc]
            start, inner, outs,
            SIZE, GROUP, SCALES, E8M0, EXACT, ZEROS, NORM, ROW_SCALES, SCALE, TOP_K, GATE, ASM, W, R, N, C, X,
        )  # fmt: skip
        waiting = waiting[1:] + (one,)  # type: ignore[assignment]  # noqa: RUF005
    for i in gl.static_range(min(AHEAD, STEPS)):
        total = _add_step(
            total, waiting[i], x_ptr, norm_ptr, scales_ptr, row_scales_ptr, scale_ptr, row,
            STEPS - min(AHEAD, STEPS) + i, expert, experts_ptr, start, inner, outs,
            SIZE, GROUP, SCALES, E8M0, EXACT, ZEROS, NORM, ROW_SCALES, SCALE, TOP_K, GATE, ASM, W, R, N, C, X,
        )  # fmt: skip
    sums = gl.sum(total, 0)
    return sums * length if NORM else sums
