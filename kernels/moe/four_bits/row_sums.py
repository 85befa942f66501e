"""The product of few rows with experts of 4 bits on tensor cores that also sums a row's experts, as `down_skinny`."""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.moe.four_bits.mma_form import MmaForm, MmaTiling, check_operands, constants, pointers
from blockyard.kernels.moe.four_bits.operands import (
    along_2,
    along_3,
    along_4,
    block_of,
    code_layout,
    sum_layout,
    weight_rows,
    x_layout,
)
from blockyard.kernels.moe.four_bits.product_steps import add_steps
from blockyard.kernels.programmatic_launch import prefetch
from blockyard.kernels.quantized.packed_weights import PackedWeights

BLOCK = 128  # inputs of a warp in a step
FETCHED = 4  # steps whose codes are fetched before the kernel waits


@gluon.jit
def _fetch_steps(
    codes_ptr, scales_ptr, experts_ptr, start, outs,
    SIZE: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, TOP_K: gl.constexpr, EXPERTS: gl.constexpr,
    COUNT: gl.constexpr, W: gl.constexpr, V: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """Fetches the codes of the first COUNT steps to the L2 cache, and the scales of the first. Experts may be those of
    another step: then it is in vain."""
    S: gl.constexpr = gl.SliceLayout(3, code_layout(W, V, R))
    BLOCKS: gl.constexpr = (SIZE + 127) // 128
    row = weight_rows(along_3(R, 1, S), start, outs, 0)
    for step in gl.static_range(COUNT):
        block, own, _ = block_of(step, along_3(W, 0, S), 0, experts_ptr, BLOCKS, W, TOP_K)
        own = gl.minimum(gl.maximum(own, 0), EXPERTS - 1) * outs
        chunk = gl.minimum(block * 4 + along_3(4, 2, S), SIZE // 32 - 1)
        prefetch(codes_ptr + own * (SIZE // 8) + (row * (SIZE // 8) + chunk * 4))
        if SCALES and step == 0:
            GROUPS: gl.constexpr = (SIZE + GROUP - 1) // GROUP
            prefetch(scales_ptr + own * GROUPS + (row * GROUPS + chunk * 32 // GROUP))


@gluon.jit
def _row_sums_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, bias_ptr, scale_ptr, experts_ptr, shared_ptr, add_ptr,
    out_ptr, outs,
    SIZE: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr,
    SMALL: gl.constexpr, ZEROS: gl.constexpr, ROW_SCALES: gl.constexpr, ASM: gl.constexpr, R: gl.constexpr,
    W: gl.constexpr, AHEAD: gl.constexpr, COPIES: gl.constexpr, V: gl.constexpr,
    BIAS: gl.constexpr, SCALE: gl.constexpr,
    SHARED: gl.constexpr, ADD: gl.constexpr, TOP_K: gl.constexpr, EXPERTS: gl.constexpr, FETCH: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    # program (i, r): outputs i * R ... of row r; all columns are that row
    N: gl.constexpr = 8
    row = gl.program_id(1)
    own_ptr = experts_ptr + row * TOP_K
    start = gl.program_id(0) * R
    if PDL:
        gdc_launch_dependents()
        _fetch_steps(
            codes_ptr, scales_ptr, own_ptr, start, outs, SIZE, GROUP, SCALES, TOP_K, EXPERTS, FETCH, W, V, R
        )  # fmt: skip
        gdc_wait()
    X: gl.constexpr = x_layout(W, V, N)
    S: gl.constexpr = gl.SliceLayout(0, sum_layout(W, V))
    Y: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = along_4(N, 3, X) * 0 + row * TOP_K
    sums = add_steps(
        x_ptr, x_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, scale_ptr + row * TOP_K, rows, 0, own_ptr,
        start, outs, outs, row, 0.0,
        SIZE, GROUP, SCALES, E8M0, EXACT, SMALL, ZEROS, False, ROW_SCALES, SCALE, TOP_K, 0, ASM, W, R, N, AHEAD, X,
        COPIES, V,
    )  # fmt: skip
    y = gl.convert_layout(gl.sum(gl.where(along_2(N, 1, S) == 0, sums, 0.0), 1), Y)
    out = start + gl.arange(0, R, Y)
    known = out < outs
    if BIAS:
        for k in gl.static_range(TOP_K):
            expert = gl.load(own_ptr + k).to(gl.int64)
            bias = gl.load(bias_ptr + expert * outs + out, mask=known, other=0.0).to(gl.float32)
            y += bias * gl.load(scale_ptr + row * TOP_K + k) if SCALE else bias
    place = row.to(gl.int64) * outs + out
    if SHARED:
        y += gl.load(shared_ptr + place, mask=known, other=0.0).to(gl.float32)
    if ADD:
        y += gl.load(add_ptr + place, mask=known, other=0.0).to(gl.float32)
    gl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=known)


def row_sums(
    x: Tensor,
    weights: PackedWeights,
    form: MmaForm,
    experts: Tensor,
    tiling: MmaTiling,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shared: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """Computes `down_skinny` with these weights. form: of them. Raises ValueError as `grouped_mma` does."""
    (num_pairs, _), (num_experts, outs, _) = x.shape, weights.shape
    rows, top_k = experts.shape
    if num_pairs != experts.numel() or experts.dtype != torch.int32 or not experts.is_contiguous():
        raise ValueError(f"experts {list(experts.shape)} {experts.dtype} do not fit {num_pairs} pairs")
    check_operands(x, weights, num_pairs, bias, scale)
    for one in (shared, add_to):
        if one is not None and (one.shape != (rows, outs) or one.dtype != x.dtype or not one.is_contiguous()):
            raise ValueError(f"{list(one.shape)} {one.dtype} is not contiguous {[rows, outs]} {x.dtype}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device) if add_to is None else add_to
    if out.numel():
        steps = ceil_div(ceil_div(weights.inputs, BLOCK) * top_k, tiling.warps)
        _row_sums_kernel[(ceil_div(outs, tiling.out_tile), rows)](
            x, *pointers(weights), out if bias is None else bias, out if scale is None else scale, experts,
            out if shared is None else shared, out, out, outs, BIAS=bias is not None, SCALE=scale is not None,
            SHARED=shared is not None, ADD=add_to is not None, TOP_K=top_k, EXPERTS=num_experts,
            FETCH=min(steps, FETCHED), **constants(x, weights, form, tiling),
        )  # fmt: skip
    return out
