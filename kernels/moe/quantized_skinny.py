"""Computes `experts_skinny` with quantized weights: codes go straight to registers and become numbers there.

Products of adjacent inputs are summed without scales, and each sum is then multiplied by the scale of its group. Where
the form rounds inputs, programs round what they have read, so that no kernel does it before.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.experts_skinny import SkinnyTiling, are_here, differ, outputs_of, read_experts
from blockyard.kernels.moe.few_rows import store_loads
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import gate_values
from blockyard.kernels.moe.operand_checks import check_loads, check_operands
from blockyard.kernels.moe.round_rows import rounded, scales_of_rows
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl
from blockyard.kernels.quantized.packed_weights import Codes, ExpertRounding, PackedWeights
from blockyard.kernels.quantized.unpack_tiles import lane_sums, load_codes, load_scales

NO_ROUNDING = ExpertRounding()


def can_round(rounding: ExpertRounding, in_tile: int) -> bool:
    """Whether the kernels round inputs so, in tiles of so many."""
    return rounding.group == 0 or (in_tile % rounding.group == 0 and rounding.group.bit_count() == 1)


@triton.jit
def _add_lanes(
    totals, codes, x, scales_ptr, zeros_ptr, table_ptr, output, known, start,
    SIZE: tl.constexpr, CODES: tl.constexpr, LANE: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    E8M0: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """totals [k, outs, TILE / LANE] and the products of a tile."""
    COUNT: tl.constexpr = totals.shape[2]
    sums = lane_sums(codes, x, table_ptr, CODES, not ZEROS, LANE)
    if ZEROS:
        given = tl.sum(tl.reshape(x, [x.shape[0], COUNT, LANE]), 2)[:, None, :]
        sums -= load_scales(zeros_ptr, output, known, start, SIZE, GROUP, COUNT, LANE, False) * given
    if SCALES:
        sums *= load_scales(scales_ptr, output, known, start, SIZE, GROUP, COUNT, LANE, E8M0)
    return totals + sums


@triton.jit
def _scales_of_row(
    x_ptr, norm_weight_ptr, eps, most, high_ptr, low_ptr,
    NORM: tl.constexpr, ROUND: tl.constexpr, STATIC: tl.constexpr, MOST: tl.constexpr, GROUP: tl.constexpr,
    SIZE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Of a row that is rounded: what an RMSNorm multiplies it by beside its weight, and what `rounded` needs to know,
    [1]. FULL: a power of 2 that is SIZE or more."""
    if ROUND == 0:
        return 1.0, 1.0, 0.0
    else:  # noqa: RET505, only one branch is compiled
        cols = tl.arange(0, FULL)[None, :]
        row = tl.load(x_ptr + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
        inverse = 1.0
        if NORM:  # as `add_rms_norm` computes it, rounded to what other products read
            inverse = tl.rsqrt(tl.sum(tl.sum(row * row, 1), 0) / SIZE + eps)
            norm_weight = tl.load(norm_weight_ptr + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
            row = (row * inverse * norm_weight).to(x_ptr.dtype.element_ty).to(tl.float32)
        scale, zero = scales_of_rows(row, most, high_ptr, low_ptr, ROUND, STATIC, MOST, GROUP)
        return inverse, scale, zero


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_quantized_kernel(
    x_ptr, norm_weight_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, table_ptr, bias_ptr, scale_ptr,
    experts_ptr, out_ptr, loads_ptr, high_ptr, low_ptr, inner, num_pairs, eps, most,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, OUT_TILE: tl.constexpr, TILE: tl.constexpr,
    LANE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, E8M0: tl.constexpr,
    ZEROS: tl.constexpr, ROW_SCALES: tl.constexpr, ROUND: tl.constexpr, STATIC: tl.constexpr, MOST: tl.constexpr,
    ROUND_GROUP: tl.constexpr, FULL: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr,
    SCALE: tl.constexpr, LOADS: tl.constexpr, BINS: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, p): outputs i * OUT_TILE ... of pair p
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pair = tl.program_id(1)
    if LOADS:
        store_loads(experts_ptr, loads_ptr, num_pairs, EXPERTS, BINS, PAIRS)
    expert = tl.load(experts_ptr + pair).to(tl.int64)
    if expert >= EXPERTS:
        return
    number = tl.arange(0, 2 * OUT_TILE)  # gate and up of one output after the other
    out = tl.program_id(0) * OUT_TILE + number // 2
    known = (out < inner)[None, :, None]
    output = (expert * 2 * inner + number % 2 * inner + out)[None, :, None]
    x_ptr += pair // TOP_K * SIZE
    codes = load_codes(codes_ptr, output, known, 0, SIZE, CODES, TILE)
    inverse, scale, zero = _scales_of_row(
        x_ptr, norm_weight_ptr, eps, most, high_ptr, low_ptr, NORM, ROUND, STATIC, MOST, ROUND_GROUP, SIZE, FULL
    )
    totals = tl.zeros([1, 2 * OUT_TILE, TILE // LANE], tl.float32)
    squares = tl.zeros([TILE // 8], tl.float32)
    for start in tl.static_range(0, SIZE, TILE):
        if start > 0:
            codes = load_codes(codes_ptr, output, known, start, SIZE, CODES, TILE)
        cols = start + tl.arange(0, TILE)
        given = tl.load(x_ptr + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
        if NORM:
            norm_weight = tl.load(norm_weight_ptr + cols, mask=cols < SIZE, other=0.0).to(tl.float32)
            if ROUND:
                given = (given * inverse * norm_weight).to(x_ptr.dtype.element_ty).to(tl.float32)
            else:
                squares += tl.sum(tl.reshape(given * given, [TILE // 8, 8]), 1)
                given *= norm_weight
        given = rounded(given[None, :], scale, zero, most, high_ptr, ROUND, STATIC, MOST, ROUND_GROUP)
        totals = _add_lanes(
            totals, codes, given, scales_ptr, zeros_ptr, table_ptr, output, known, start,
            SIZE, CODES, LANE, GROUP, SCALES, E8M0, ZEROS,
        )  # fmt: skip
    total = tl.reshape(tl.sum(totals, 2), [2 * OUT_TILE])
    known = out < inner
    output = expert * 2 * inner + number % 2 * inner + out
    if NORM and not ROUND:
        total *= tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    if ROW_SCALES:
        total *= tl.load(row_scales_ptr + output, mask=known, other=0.0).to(tl.float32)
    if SCALE:
        total *= tl.load(scale_ptr + pair)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=known, other=0.0).to(tl.float32)
    left, up = tl.split(tl.reshape(total, [OUT_TILE, 2]))
    out = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    y = gate_values(left, up, GATE)
    tl.store(out_ptr + pair.to(tl.int64) * inner + out, y.to(out_ptr.dtype.element_ty), mask=out < inner)


@triton.jit
def _down_quantized_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, table_ptr, bias_ptr, scale_ptr, experts_ptr, shared_ptr,
    add_ptr, out_ptr, high_ptr, low_ptr, outs, most,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, K_TILE: tl.constexpr, OUT_TILE: tl.constexpr,
    TILE: tl.constexpr, LANE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
    E8M0: tl.constexpr, ZEROS: tl.constexpr, ROW_SCALES: tl.constexpr, ROUND: tl.constexpr, STATIC: tl.constexpr,
    MOST: tl.constexpr, ROUND_GROUP: tl.constexpr, FULL: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    SHARED: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, r): outputs i * OUT_TILE ... of row r, in tiles [experts, outputs, inputs]
    row = tl.program_id(1).to(tl.int64)
    out = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    k = tl.arange(0, K_TILE)
    experts = read_experts(experts_ptr + row * TOP_K, EXPERTS, TOP_K)
    here = are_here(experts, EXPERTS, TOP_K, K_TILE)
    known = (here[:, None] & (out < outs)[None, :])[:, :, None]
    output = outputs_of(experts, outs, out, TOP_K, K_TILE)[:, :, None]
    codes = load_codes(codes_ptr, output, known, 0, SIZE, CODES, TILE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
        guess = experts
        experts = read_experts(experts_ptr + row * TOP_K, EXPERTS, TOP_K)
        if differ(guess, experts, TOP_K):
            here = are_here(experts, EXPERTS, TOP_K, K_TILE)
            known = (here[:, None] & (out < outs)[None, :])[:, :, None]
            output = outputs_of(experts, outs, out, TOP_K, K_TILE)[:, :, None]
            codes = load_codes(codes_ptr, output, known, 0, SIZE, CODES, TILE)
    rows = x_ptr + ((row * TOP_K + tl.minimum(k, TOP_K - 1)) * SIZE)[:, None]
    scale, zero = 1.0, 0.0
    if ROUND:
        every = tl.arange(0, FULL)[None, :]
        whole = tl.load(rows + every, mask=here[:, None] & (every < SIZE), other=0.0).to(tl.float32)
        scale, zero = scales_of_rows(whole, most, high_ptr, low_ptr, ROUND, STATIC, MOST, ROUND_GROUP)
    totals = tl.zeros([K_TILE, OUT_TILE, TILE // LANE], tl.float32)
    for start in tl.static_range(0, SIZE, TILE):
        if start > 0:
            codes = load_codes(codes_ptr, output, known, start, SIZE, CODES, TILE)
        cols = start + tl.arange(0, TILE)[None, :]
        given = tl.load(rows + cols, mask=here[:, None] & (cols < SIZE), other=0.0).to(tl.float32)
        given = rounded(given, scale, zero, most, high_ptr, ROUND, STATIC, MOST, ROUND_GROUP)
        totals = _add_lanes(
            totals, codes, given, scales_ptr, zeros_ptr, table_ptr, output, known, start,
            SIZE, CODES, LANE, GROUP, SCALES, E8M0, ZEROS,
        )  # fmt: skip
    total = tl.sum(totals, 2)
    output = outputs_of(experts, outs, out, TOP_K, K_TILE)
    inside = here[:, None] & (out < outs)[None, :]
    if ROW_SCALES:
        total *= tl.load(row_scales_ptr + output, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    if SCALE:
        total *= tl.load(scale_ptr + row * TOP_K + k, mask=here, other=0.0)[:, None]
    y = tl.sum(tl.where(inside, total, 0.0), 0)
    if SHARED:
        y += tl.load(shared_ptr + row * outs + out, mask=out < outs, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(add_ptr + row * outs + out, mask=out < outs, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outs + out, y.to(out_ptr.dtype.element_ty), mask=out < outs)


def gate_up_quantized(
    x: Tensor,
    weights: PackedWeights,
    experts: Tensor,
    tiling: SkinnyTiling,
    gate: Gate,
    *,
    rounding: ExpertRounding = NO_ROUNDING,
    norm: RMSNorm | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    loads: Tensor | None = None,
) -> Tensor:
    """Computes `gate_up_skinny` with quantized weights. rounding: of the input, which is normalised before.

    Raises ValueError for other shapes, dtypes and layouts, and for a rounding that `can_round` denies.
    """
    (rows, size), (num_experts, outs, _) = x.shape, weights.shape
    if gate is Gate.NONE or outs % 2:
        raise ValueError(f"{outs} outputs are not gate and up, or there is no gate")
    _check(x, weights, experts, rows, tiling, rounding, bias, scale)
    check_loads(loads, num_experts)
    if norm is not None and (norm.weight.shape != (size,) or norm.weight.dtype not in (x.dtype, torch.float32)):
        raise ValueError(f"the norm's {list(norm.weight.shape)} {norm.weight.dtype} does not fit {size} {x.dtype}")
    num_pairs, inner, pdl = experts.numel(), outs // 2, supports_pdl(x.device)
    out = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    if out.numel():
        _gate_up_quantized_kernel[(ceil_div(inner, tiling.out_tile), num_pairs)](
            x, x if norm is None else norm.weight, *pointers(weights), x if bias is None else bias,
            x if scale is None else scale, experts, out, experts if loads is None else loads,
            x if rounding.high is None else rounding.high, x if rounding.low is None else rounding.low, inner,
            num_pairs, 0.0 if norm is None else norm.eps, 0.0 if rounding.most is None else rounding.most,
            SIZE=size, EXPERTS=num_experts, TOP_K=experts.shape[1], OUT_TILE=tiling.out_tile, TILE=tiling.in_tile,
            GATE=int(gate), NORM=norm is not None, BIAS=bias is not None, SCALE=scale is not None,
            LOADS=loads is not None, BINS=next_power_of_2(num_experts + 1),
            PAIRS=max(next_power_of_2(num_pairs), 16), PDL=pdl, num_warps=tiling.warps,
            **_constants(weights, rounding, tiling), **pdl_options(pdl),
        )  # fmt: skip
    return out


def down_quantized(
    x: Tensor,
    weights: PackedWeights,
    experts: Tensor,
    tiling: SkinnyTiling,
    *,
    rounding: ExpertRounding = NO_ROUNDING,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shared: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """Computes `down_skinny` with quantized weights. Raises ValueError as `gate_up_quantized` does."""
    (num_pairs, _), (num_experts, outs, size) = x.shape, weights.shape
    rows, top_k = experts.shape
    _check(x, weights, experts, num_pairs, tiling, rounding, bias, scale)
    for one in (shared, add_to):
        if one is not None and (one.shape != (rows, outs) or one.dtype != x.dtype or not one.is_contiguous()):
            raise ValueError(f"{list(one.shape)} {one.dtype} is not contiguous {[rows, outs]} {x.dtype}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device) if add_to is None else add_to
    if out.numel():
        pdl = supports_pdl(x.device)
        _down_quantized_kernel[(ceil_div(outs, tiling.out_tile), rows)](
            x, *pointers(weights), x if bias is None else bias, x if scale is None else scale, experts,
            x if shared is None else shared, out, out, x if rounding.high is None else rounding.high,
            x if rounding.low is None else rounding.low, outs, 0.0 if rounding.most is None else rounding.most,
            SIZE=size, EXPERTS=num_experts, TOP_K=top_k, K_TILE=next_power_of_2(top_k), OUT_TILE=tiling.out_tile,
            TILE=tiling.in_tile, BIAS=bias is not None, SCALE=scale is not None, SHARED=shared is not None,
            ADD=add_to is not None, PDL=pdl, num_warps=tiling.warps, **_constants(weights, rounding, tiling),
            **pdl_options(pdl),
        )  # fmt: skip
    return out


def pointers(weights: PackedWeights) -> list[Tensor]:
    """Codes, scales, zeros, scales of rows and table; codes in the place of what there is not."""
    some = (weights.scales, weights.zeros, weights.row_scales, weights.table)
    return [weights.codes, *(weights.codes if one is None else one for one in some)]


def _constants(weights: PackedWeights, rounding: ExpertRounding, tiling: SkinnyTiling) -> dict[str, Any]:
    packed = 2 if weights.kind <= Codes.TABLE4 else 1
    lane = min(16 * packed, tiling.in_tile)  # those of 16 bytes, which a thread loads at once
    return {
        "LANE": math.gcd(lane, weights.group) if weights.group else lane,
        "CODES": int(weights.kind),
        "GROUP": weights.group,
        "SCALES": weights.scales is not None,
        "E8M0": weights.is_e8m0,
        "ZEROS": weights.zeros is not None,
        "ROW_SCALES": weights.row_scales is not None,
        "ROUND": int(rounding.kind),
        "STATIC": rounding.high is not None,
        "MOST": rounding.most is not None,
        "ROUND_GROUP": rounding.group,
        "FULL": next_power_of_2(weights.inputs),
    }


def _check(
    x: Tensor, weights: PackedWeights, experts: Tensor, rows: int, tiling: SkinnyTiling, rounding: ExpertRounding,
    bias: Tensor | None, scale: Tensor | None,
) -> None:  # fmt: skip
    """Checks what both products have; rows: of x, one a row or one a pair. Raises ValueError."""
    weights.check()
    if x.shape[1] != weights.inputs or rows not in (len(experts), experts.numel()):
        raise ValueError(f"rows {list(x.shape)} of experts {list(experts.shape)} do not fit {list(weights.shape)}")
    check_operands(x, x, experts.numel(), None, scale)
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weights.shape[:2] or not bias.is_contiguous()):
        raise ValueError(f"a bias {list(bias.shape)} {bias.dtype} does not fit {list(weights.shape)} {x.dtype}")
    if experts.dtype != torch.int32 or not experts.is_contiguous():
        raise ValueError(f"experts must be contiguous int32, got {experts.dtype} with strides {experts.stride()}")
    if not can_round(rounding, tiling.in_tile):
        raise ValueError(f"tiles of {tiling.in_tile} inputs are no whole groups of {rounding.group}")
