"""The steps of a product on tensor cores of weights with 4 bits: loads some steps ahead, and sums of all warps.

The weight is the left operand, made in registers (`operands`). Codes of later steps wait in registers, or in shared
memory, to which they are copied asynchronously: then more programs run at a time, with more steps ahead.

The warps of a program take the blocks of inputs in turn and add their sums at the end, so that no step waits for
another warp. A pair's sum has the same terms in the same order beside any other pairs. Scales that the dtype of x
cannot hold are the sum of two numbers of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from blockyard.kernels.moe.four_bits.operands import (
    along_2,
    block_of,
    code_layout,
    code_places,
    inverse_length,
    left_operand,
    load_factors,
    load_norm,
    load_x,
    right_operand,
    sum_layout,
    weight_rows,
)
from blockyard.kernels.quantized.unpack_tiles import scale_numbers

# Triton 3.6 has it by another name
_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def _load_step(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, step, row, expert, experts_ptr, start, inner, outs,
    SIZE: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, ZEROS: gl.constexpr, TOP_K: gl.constexpr,
    GATE: gl.constexpr, W: gl.constexpr, R: gl.constexpr, L: gl.constexpr, X: gl.constexpr,
    COPIES: gl.constexpr,
):  # fmt: skip
    """What is read of a weight for a step: words without COPIES, then scales and zeros, if words have some of their
    own; at last the inputs, if they are few. More would take so many registers that fewer programs run at a time."""
    loaded = ()
    if not COPIES:
        places = code_places(codes_ptr, step, expert, experts_ptr, start, inner, outs, SIZE, TOP_K, GATE, W, R, L)
        loaded = loaded + (gl.load(places),)  # type: ignore[assignment]  # noqa: RUF005
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
    SMALL: gl.constexpr, ZEROS: gl.constexpr, NORM: gl.constexpr, ROW_SCALES: gl.constexpr, SCALE: gl.constexpr,
    TOP_K: gl.constexpr, GATE: gl.constexpr, ASM: gl.constexpr, W: gl.constexpr, R: gl.constexpr, N: gl.constexpr,
    C: gl.constexpr, X: gl.constexpr,
):  # fmt: skip
    """total [W, R, N] and the products of what `_load_step` has loaded."""
    x = loaded[-1] if N == 8 else load_x(x_ptr, row, step, experts_ptr, SIZE, TOP_K, W, X)
    if NORM:
        x = (x * load_norm(norm_ptr, step, SIZE, W, X)).to(x_ptr.dtype.element_ty)
    left = left_operand(
        loaded[0],
        loaded[1:],
        SCALES and GROUP % 128 != 0,
        E8M0,
        EXACT,
        SMALL,
        ZEROS,
        x_ptr.dtype.element_ty,
        ASM,
        W,
        R,
        C,
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
    SMALL: gl.constexpr, ZEROS: gl.constexpr, NORM: gl.constexpr, ROW_SCALES: gl.constexpr, SCALE: gl.constexpr,
    TOP_K: gl.constexpr, GATE: gl.constexpr, ASM: gl.constexpr, W: gl.constexpr, R: gl.constexpr, N: gl.constexpr,
    AHEAD: gl.constexpr, X: gl.constexpr, COPIES: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """The sums of a program's rows of a weight and columns, float32 [R, N]. With TOP_K of that many experts. With NORM
    all columns are of row `first_row`."""
    C: gl.constexpr = sum_layout(W, V)
    L: gl.constexpr = code_layout(W, V, R)
    BLOCKS: gl.constexpr = (SIZE + 127) // 128
    STEPS: gl.constexpr = (BLOCKS * (TOP_K if TOP_K else 1) + W - 1) // W
    total = gl.zeros([W, R, N], gl.float32, C)
    MOST: gl.constexpr = min(AHEAD, STEPS)
    KEPT: gl.constexpr = min(1, STEPS) if COPIES else MOST  # steps in registers
    waiting = ()
    if COPIES:
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
        copies = gl.allocate_shared_memory(gl.int32, [MOST + 1, W, R, 4, 4], SHARED)
        for step in gl.static_range(MOST):
            _copy(
                copies.index(step),
                code_places(codes_ptr, step, expert, experts_ptr, start, inner, outs, SIZE, TOP_K, GATE, W, R, L),
            )
            async_copy.commit_group()
    for step in gl.static_range(KEPT):
        one = _load_step(
            x_ptr, codes_ptr, scales_ptr, zeros_ptr, step, row, expert, experts_ptr, start, inner, outs,
            SIZE, GROUP, SCALES, ZEROS, TOP_K, GATE, W, R, L, X, COPIES,
        )  # fmt: skip
        waiting = waiting + (one,)  # type: ignore[assignment]  # noqa: RUF005
    length = 1.0
    if NORM:  # while the first steps are loaded
        length = inverse_length(x_ptr, first_row, eps, SIZE)
    for step in range(STEPS - KEPT):
        one = _load_step(
            x_ptr, codes_ptr, scales_ptr, zeros_ptr, step + KEPT, row, expert, experts_ptr, start, inner, outs,
            SIZE, GROUP, SCALES, ZEROS, TOP_K, GATE, W, R, L, X, COPIES,
        )  # fmt: skip
        now = waiting[0]  # type: ignore[misc]
        if COPIES:
            if MOST < STEPS:  # noqa: SIM102, known when compiled
                if step + MOST < STEPS:
                    later = code_places(
                        codes_ptr, step + MOST, expert, experts_ptr, start, inner, outs, SIZE, TOP_K, GATE, W, R, L
                    )
                    _copy(copies.index((step + MOST) % (MOST + 1)), later)
            async_copy.commit_group()
            async_copy.wait_group(MOST)
            now = (copies.index(step % (MOST + 1)).load(L),) + now  # noqa: RUF005
        total = _add_step(
            total, now, x_ptr, norm_ptr, scales_ptr, row_scales_ptr, scale_ptr, row, step, expert, experts_ptr,
            start, inner, outs,
            SIZE, GROUP, SCALES, E8M0, EXACT, SMALL, ZEROS, NORM, ROW_SCALES, SCALE, TOP_K, GATE, ASM, W, R, N, C, X,
        )  # fmt: skip
        waiting = waiting[1:] + (one,)  # type: ignore[assignment]  # noqa: RUF005
    for i in gl.static_range(KEPT):
        now = waiting[i]
        if COPIES:
            async_copy.wait_group(0)
            now = (copies.index((STEPS - KEPT + i) % (MOST + 1)).load(L),) + now  # noqa: RUF005
        total = _add_step(
            total, now, x_ptr, norm_ptr, scales_ptr, row_scales_ptr, scale_ptr, row, STEPS - KEPT + i, expert,
            experts_ptr, start, inner, outs,
            SIZE, GROUP, SCALES, E8M0, EXACT, SMALL, ZEROS, NORM, ROW_SCALES, SCALE, TOP_K, GATE, ASM, W, R, N, C, X,
        )  # fmt: skip
    sums = gl.sum(total, 0)
    if SMALL:
        sums *= 4611686018427387904.0
    return sums * length if NORM else sums
