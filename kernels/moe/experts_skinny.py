"""The MLP of the experts of one to a few rows: two products of each pair, without tensor cores and without a map.

As in `layers/linear_skinny`, weights go straight to registers, and the products are summed in float32. The first
product has the gate in it. The second one sums the experts of a row, in the order of its pairs, and may add the sum to
an existing tensor. Rows with the same expert read its weights each. Experts from the number of experts on are those of
other ranks: their pairs add nothing, and no weight is read for them.

With PDL (see `programmatic_launch`) the first product announces the second one after its own wait. By then the experts
are known, so the second product may load their weights while the first one ends. It reads the experts again after its
wait, and loads other weights if they were others: correct results need no early read.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.combine_experts import combine_experts_reference
from blockyard.kernels.moe.few_rows import store_loads
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import gate_values, grouped_linear_reference
from blockyard.kernels.moe.operand_checks import check_loads, check_operands
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl


@dataclass(frozen=True, slots=True)
class SkinnyTiling:
    """Outputs of a program and inputs that it loads of each at a time, powers of two; of `down`, of each expert."""

    out_tile: int
    in_tile: int  # a multiple of 16 bytes
    warps: int


def gate_up_skinny_reference(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    gate: Gate,
    *,
    norm: RMSNorm | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
) -> Tensor:
    if norm is not None:
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    pairs = grouped_linear_reference(
        x.float(), weight, experts, bias=bias, gate=gate, scale=scale, scale_first=scale is not None
    )
    return pairs.to(weight.dtype)


def down_skinny_reference(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shared: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    pairs = grouped_linear_reference(x.float(), weight, experts, bias=bias, scale=scale)
    total = combine_experts_reference(pairs, experts.shape[1], shared)
    return (total if add_to is None else total + add_to.float()).to(x.dtype)


@triton.jit(do_not_specialize=["num_pairs"])
def _gate_up_skinny_kernel(
    x_ptr, norm_weight_ptr, weight_ptr, bias_ptr, scale_ptr, experts_ptr, out_ptr, loads_ptr, inner, num_pairs, eps,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, OUT_TILE: tl.constexpr, TILE: tl.constexpr,
    LANE: tl.constexpr, GATE: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr,
    LOADS: tl.constexpr, BINS: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
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
    known = out < inner
    output = expert * 2 * inner + number % 2 * inner + out
    cols = tl.arange(0, TILE)
    weights = weight_ptr + (output * SIZE)[:, None] + cols[None, :]
    x = x_ptr + pair // TOP_K * SIZE + cols
    totals = tl.zeros([2 * OUT_TILE, TILE // LANE], tl.float32)
    squares = tl.zeros([TILE // LANE], tl.float32)
    for start in tl.static_range(0, SIZE, TILE):
        inside = start + cols < SIZE
        weight = tl.load(weights + start, mask=known[:, None] & inside[None, :], other=0.0)
        given = tl.load(x + start, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(tl.reshape(given * given, [TILE // LANE, LANE]), 1)
            given *= tl.load(norm_weight_ptr + start + cols, mask=inside, other=0.0).to(tl.float32)
        products = tl.reshape(weight.to(tl.float32) * given[None, :], [2 * OUT_TILE, TILE // LANE, LANE])
        totals += tl.sum(products, 2)
    total = tl.sum(totals, 1)
    if NORM:
        total *= tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    if SCALE:
        total *= tl.load(scale_ptr + pair)
    if BIAS:
        total += tl.load(bias_ptr + output, mask=known, other=0.0).to(tl.float32)
    left, up = tl.split(tl.reshape(total, [OUT_TILE, 2]))
    out = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    y = gate_values(left, up, GATE)
    tl.store(out_ptr + pair.to(tl.int64) * inner + out, y.to(out_ptr.dtype.element_ty), mask=out < inner)


@triton.jit
def read_experts(experts_ptr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr):
    """The experts of a row as a tuple of numbers from 0 to EXPERTS, whatever is in memory."""
    experts = ()
    for i in tl.static_range(TOP_K):
        one = tl.load(experts_ptr + i)  # kept in L1: all programs read these few numbers, and L2 has them in one place
        experts += (tl.minimum(tl.maximum(one, 0), EXPERTS),)  # type: ignore[assignment]
    return experts


@triton.jit
def differ(left, right, TOP_K: tl.constexpr):
    found = left[0] != right[0]
    for i in tl.static_range(1, TOP_K):
        found |= left[i] != right[i]
    return found


@triton.jit
def are_here(experts, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, K_TILE: tl.constexpr):
    """Which of the experts of a row this rank has, [experts of a row]."""
    k = tl.arange(0, K_TILE)
    expert = tl.full([K_TILE], EXPERTS, tl.int32)
    for i in tl.static_range(TOP_K):
        expert = tl.where(k == i, experts[i], expert)
    return expert < EXPERTS


@triton.jit
def outputs_of(experts, outs, out, TOP_K: tl.constexpr, K_TILE: tl.constexpr):
    """Numbers of outputs among all experts' outputs, int64 [experts of a row, outputs of a program]."""
    k = tl.arange(0, K_TILE)[:, None]
    expert = tl.zeros([K_TILE, 1], tl.int64)
    for i in tl.static_range(TOP_K):
        expert = tl.where(k == i, experts[i].to(tl.int64), expert)
    return expert * outs + out[None, :]


@triton.jit
def _down_skinny_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, experts_ptr, shared_ptr, add_ptr, out_ptr, outs,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, K_TILE: tl.constexpr, OUT_TILE: tl.constexpr,
    TILE: tl.constexpr, LANE: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SHARED: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, r): outputs i * OUT_TILE ... of row r, in tiles [experts, outputs, inputs]
    row = tl.program_id(1).to(tl.int64)
    out = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    k = tl.arange(0, K_TILE)
    cols = tl.arange(0, TILE)[None, None, :]
    experts = read_experts(experts_ptr + row * TOP_K, EXPERTS, TOP_K)
    here = are_here(experts, EXPERTS, TOP_K, K_TILE)
    known = (here[:, None] & (out < outs)[None, :])[:, :, None]
    output = outputs_of(experts, outs, out, TOP_K, K_TILE)
    weight = tl.load(weight_ptr + (output * SIZE)[:, :, None] + cols, mask=known & (cols < SIZE), other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
        guess = experts
        experts = read_experts(experts_ptr + row * TOP_K, EXPERTS, TOP_K)
        if differ(guess, experts, TOP_K):
            here = are_here(experts, EXPERTS, TOP_K, K_TILE)
            known = (here[:, None] & (out < outs)[None, :])[:, :, None]
            output = outputs_of(experts, outs, out, TOP_K, K_TILE)
            weight = tl.load(weight_ptr + (output * SIZE)[:, :, None] + cols, mask=known & (cols < SIZE), other=0.0)
    totals = tl.zeros([K_TILE, OUT_TILE, TILE // LANE], tl.float32)
    # each output reads x for itself: its tile then has the layout of the weights
    x = x_ptr + (tl.broadcast_to((row * TOP_K + k)[:, None] * SIZE, [K_TILE, OUT_TILE]))[:, :, None] + cols
    for start in tl.static_range(0, SIZE, TILE):
        inside = known & (start + cols < SIZE)
        if start > 0:
            weight = tl.load(weight_ptr + (output * SIZE)[:, :, None] + (start + cols), mask=inside, other=0.0)
        products = weight.to(tl.float32) * tl.load(x + start, mask=inside, other=0.0).to(tl.float32)
        totals += tl.sum(tl.reshape(products, [K_TILE, OUT_TILE, TILE // LANE, LANE]), 3)
    total = tl.sum(totals, 2)
    if BIAS:
        inside = here[:, None] & (out < outs)[None, :]
        total += tl.load(bias_ptr + output, mask=inside, other=0.0).to(tl.float32)
    if SCALE:
        total *= tl.load(scale_ptr + row * TOP_K + k, mask=here, other=0.0)[:, None]
    y = tl.sum(total, 0)
    if SHARED:
        y += tl.load(shared_ptr + row * outs + out, mask=out < outs, other=0.0).to(tl.float32)
    if ADD:
        y += tl.load(add_ptr + row * outs + out, mask=out < outs, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * outs + out, y.to(out_ptr.dtype.element_ty), mask=out < outs)


def gate_up_skinny(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    tiling: SkinnyTiling,
    gate: Gate,
    *,
    norm: RMSNorm | None = None,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    loads: Tensor | None = None,
) -> Tensor:
    """x [rows, in], weight [experts, 2 * inner, in], the gate first, experts [rows, top_k] int32 -> [pairs, inner].

    norm: x is normalised first; its weight may be float32. bias [experts, 2 * inner]. scale [rows, top_k] float32
    multiplies the input. loads [experts] int32 gets the number of pairs of each expert. Sums are in float32. All
    tensors are contiguous. Rows of pairs of other ranks' experts are not written. Raises ValueError for other shapes,
    dtypes and layouts.
    """
    (rows, size), (num_experts, outs, _) = x.shape, weight.shape
    if gate is Gate.NONE or outs % 2:
        raise ValueError(f"{outs} outputs are not gate and up, or there is no gate")
    _check(x, weight, experts, rows, bias, scale)
    check_loads(loads, num_experts)
    if norm is not None and (norm.weight.shape != (size,) or norm.weight.dtype not in (x.dtype, torch.float32)):
        raise ValueError(f"the norm's {list(norm.weight.shape)} {norm.weight.dtype} does not fit {size} {x.dtype}")
    num_pairs, inner, pdl = experts.numel(), outs // 2, supports_pdl(x.device)
    out = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    if out.numel():
        _gate_up_skinny_kernel[(ceil_div(inner, tiling.out_tile), num_pairs)](
            x, weight if norm is None else norm.weight, weight, weight if bias is None else bias,
            weight if scale is None else scale, experts, out, experts if loads is None else loads, inner, num_pairs,
            0.0 if norm is None else norm.eps, SIZE=size, EXPERTS=num_experts, TOP_K=experts.shape[1],
            OUT_TILE=tiling.out_tile, TILE=tiling.in_tile, LANE=16 // x.element_size(), GATE=int(gate),
            NORM=norm is not None, BIAS=bias is not None, SCALE=scale is not None, LOADS=loads is not None,
            BINS=next_power_of_2(num_experts + 1), PAIRS=max(next_power_of_2(num_pairs), 16), PDL=pdl,
            num_warps=tiling.warps, **pdl_options(pdl),
        )  # fmt: skip
    return out


def down_skinny(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    tiling: SkinnyTiling,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    shared: Tensor | None = None,
    add_to: Tensor | None = None,
) -> Tensor:
    """x [pairs, in], weight [experts, out, in], experts [rows, top_k] int32 -> [rows, out], each row's sum.

    bias [experts, out]. scale [rows, top_k] float32 multiplies what an expert makes, with its bias. shared [rows, out]
    is added to the sum. add_to [rows, out] is increased by the sum and returned. All tensors are contiguous. Raises
    ValueError for other shapes, dtypes and layouts.
    """
    (num_pairs, size), (num_experts, outs, _) = x.shape, weight.shape
    rows, top_k = experts.shape
    _check(x, weight, experts, num_pairs, bias, scale)
    for one in (shared, add_to):
        if one is not None and (one.shape != (rows, outs) or one.dtype != x.dtype or not one.is_contiguous()):
            raise ValueError(f"{list(one.shape)} {one.dtype} is not contiguous {[rows, outs]} {x.dtype}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device) if add_to is None else add_to
    if out.numel():
        pdl = supports_pdl(x.device)
        _down_skinny_kernel[(ceil_div(outs, tiling.out_tile), rows)](
            x, weight, weight if bias is None else bias, weight if scale is None else scale, experts,
            x if shared is None else shared, out, out, outs, SIZE=size, EXPERTS=num_experts, TOP_K=top_k,
            K_TILE=next_power_of_2(top_k), OUT_TILE=tiling.out_tile, TILE=tiling.in_tile, LANE=16 // x.element_size(),
            BIAS=bias is not None, SCALE=scale is not None, SHARED=shared is not None, ADD=add_to is not None, PDL=pdl,
            num_warps=tiling.warps, **pdl_options(pdl),
        )  # fmt: skip
    return out


def _check(
    x: Tensor, weight: Tensor, experts: Tensor, rows: int, bias: Tensor | None, scale: Tensor | None
) -> None:  # fmt: skip
    """Checks what both products have; rows: of x, one a row or one a pair. Raises ValueError."""
    if x.shape[1] != weight.shape[2] or rows not in (len(experts), experts.numel()):
        raise ValueError(f"rows {list(x.shape)} of experts {list(experts.shape)} do not fit {list(weight.shape)}")
    check_operands(x, weight, experts.numel(), bias, scale)
    if experts.dtype != torch.int32 or not experts.is_contiguous():
        raise ValueError(f"experts must be contiguous int32, got {experts.dtype} with strides {experts.stride()}")
