"""Computes `grouped_linear` with quantized weights, for few and for many pairs: each tile of codes becomes numbers.

Integers of few bits are numbers of the dtype of x as they are, so products on tensor cores take them without scales
where all inputs of a tile have one scale, and the sum of the tile is multiplied by it. Otherwise scales come first, and
the result is rounded to that dtype. Inputs that are rounded to 8 bits meet codes of 8 bits, without unpacking.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.moe.few_rows import store_loads, tile_pairs
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import GroupedTiling, gate_values, load_bias, unmapped
from blockyard.kernels.moe.map_experts import ExpertMap
from blockyard.kernels.moe.operand_checks import check_loads
from blockyard.kernels.moe.quantized_skinny import pointers
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl
from blockyard.kernels.quantized.packed_weights import Codes, ExpertRounding, PackedWeights, RoundedTo
from blockyard.kernels.quantized.unpack_assembly import unpack_assembly
from blockyard.kernels.quantized.unpack_tiles import load_scales, unpack_tile

FEWEST_INPUTS = 32  # of a product of codes on tensor cores
NATIVE = (RoundedTo.E4M3, RoundedTo.INT8)  # codes are multiplied as they are


def takes_codes(weights: PackedWeights, rounding: ExpertRounding) -> bool:
    """Whether the kernel takes inputs as codes with scales; otherwise they are rounded to numbers of their dtype."""
    return all(group % FEWEST_INPUTS == 0 for group in (weights.group, rounding.group))


@triton.jit
def _add_tile(
    total, x, x_scale, codes_ptr, scales_ptr, zeros_ptr, table_ptr, output, known, start,
    SIZE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, SCALES: tl.constexpr,
    E8M0: tl.constexpr, ZEROS: tl.constexpr, SCALE_LAST: tl.constexpr, X_GROUP: tl.constexpr,
    OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """total [OUT_TILE, pairs] and the products of a tile of inputs, x [IN_TILE, pairs]."""
    tile = unpack_tile(
        codes_ptr, scales_ptr, zeros_ptr, table_ptr, output, known, start,
        SIZE, CODES, GROUP, EACH, SCALES and not SCALE_LAST, E8M0, ZEROS, OUT_TILE, IN_TILE, x.dtype, ASM,
    )  # fmt: skip
    if SCALE_LAST or X_GROUP:
        part = tl.dot(tile, x, input_precision="ieee").to(tl.float32)
        if SCALE_LAST:
            part *= load_scales(scales_ptr, output, known, start, SIZE, GROUP, 1, IN_TILE, E8M0)
        if X_GROUP:
            part *= x_scale
        return total + part
    else:  # noqa: RET505, only one branch is compiled
        # on Hopper, sums of 8-bit floats lose bits unless a part of the inputs is added at a time
        return tl.dot(tile, x, total, input_precision="ieee", max_num_imprecise_acc=IN_TILE, out_dtype=total.dtype)


@triton.jit
def _scaled(
    total, row_scales_ptr, output, known, x_scales, here, ROW_SCALES: tl.constexpr, X_SCALES: tl.constexpr,
):  # fmt: skip
    """Sums in float32, multiplied by the scales of their outputs and of their rows of x."""
    total = total.to(tl.float32)
    if ROW_SCALES:
        total *= tl.load(row_scales_ptr + output, mask=known, other=0.0).to(tl.float32)
    if X_SCALES:
        total *= tl.load(x_scales, mask=here[None, :], other=0.0)
    return total


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_quantized_kernel(
    x_ptr, x_scales_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, table_ptr, bias_ptr, scale_ptr, out_ptr,
    pairs_ptr, owners_ptr, loads_ptr, num_pairs, outs, pairs_of_row,
    SIZE: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, SCALES: tl.constexpr,
    E8M0: tl.constexpr, ZEROS: tl.constexpr, ROW_SCALES: tl.constexpr, SCALE_LAST: tl.constexpr,
    X_SCALES: tl.constexpr, X_GROUP: tl.constexpr, OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, TILE: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SCALE_FIRST: tl.constexpr, STAGES: tl.constexpr,
    TOP_K: tl.constexpr, K_TILE: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j): outputs i * OUT_TILE ... of the pairs of tile j; with TOP_K there is no map, and pair j has tile j
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile = tl.program_id(1)
    if EXPERTS:
        store_loads(owners_ptr, loads_ptr, num_pairs, EXPERTS, BINS, TILE * K_TILE)
    owner, pair = tile_pairs(owners_ptr, pairs_ptr, tile, num_pairs, TOP_K, K_TILE, TILE)
    if owner < 0:
        return
    expert = owner.to(tl.int64)
    here = pair < num_pairs
    inner = outs // 2 if GATE else outs
    out = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    known = (out < inner)[:, None]
    output = (expert * outs + out)[:, None]
    cols = tl.arange(0, IN_TILE)
    row = (pair // pairs_of_row).to(tl.int64)[None, :]
    X_GROUPS: tl.constexpr = (SIZE + X_GROUP - 1) // X_GROUP if X_GROUP else 1
    SUM: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([OUT_TILE, TILE], SUM)
    up_total = tl.zeros([OUT_TILE, TILE], SUM)
    for start in tl.range(0, SIZE, IN_TILE, num_stages=STAGES):
        col = start + cols
        inside = here[None, :] if SIZE % IN_TILE == 0 else here[None, :] & (col < SIZE)[:, None]
        x = tl.load(x_ptr + row * SIZE + col[:, None], mask=inside, other=0.0)
        x_scale = 1.0
        if X_GROUP:
            x_scale = tl.load(x_scales_ptr + row * X_GROUPS + start // X_GROUP, mask=here[None, :], other=0.0)
        total = _add_tile(
            total, x, x_scale, codes_ptr, scales_ptr, zeros_ptr, table_ptr, output, known, start,
            SIZE, CODES, GROUP, EACH, SCALES, E8M0, ZEROS, SCALE_LAST, X_GROUP, OUT_TILE, IN_TILE, ASM,
        )  # fmt: skip
        if GATE:
            up_total = _add_tile(
                up_total, x, x_scale, codes_ptr, scales_ptr, zeros_ptr, table_ptr, output + inner, known, start,
                SIZE, CODES, GROUP, EACH, SCALES, E8M0, ZEROS, SCALE_LAST, X_GROUP, OUT_TILE, IN_TILE, ASM,
            )  # fmt: skip
    total = _scaled(
        total, row_scales_ptr, output, known, x_scales_ptr + row, here, ROW_SCALES, X_SCALES and X_GROUP == 0
    )  # fmt: skip
    if GATE:
        up_total = _scaled(
            up_total, row_scales_ptr, output + inner, known, x_scales_ptr + row, here, ROW_SCALES,
            X_SCALES and X_GROUP == 0,
        )  # fmt: skip
    if SCALE:
        scale = tl.load(scale_ptr + pair, mask=here, other=0.0)[None, :]
        if SCALE_FIRST:
            total *= scale
            up_total *= scale
    total += load_bias(bias_ptr, expert, 0, out, inner, outs, BIAS)
    if GATE:
        total = gate_values(total, up_total + load_bias(bias_ptr, expert, inner, out, inner, outs, BIAS), GATE)
    if SCALE and not SCALE_FIRST:
        total *= scale
    places = out_ptr + pair.to(tl.int64)[None, :] * inner + out[:, None]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=here[None, :] & known)


def grouped_quantized(
    x: Tensor,
    weights: PackedWeights,
    mapped: ExpertMap | Tensor,
    num_pairs: int,
    tiling: GroupedTiling,
    dtype: torch.dtype,
    *,
    x_scales: Tensor | None = None,
    bias: Tensor | None = None,
    gate: Gate = Gate.NONE,
    scale: Tensor | None = None,
    scale_first: bool = False,
    loads: Tensor | None = None,
) -> Tensor:
    """Computes `grouped_linear` with quantized weights; the result has this dtype.

    x [rows, in]: numbers of that dtype, or codes of 8 bits like the weights', then with x_scales float32
    [rows, groups]. Raises ValueError for other shapes, dtypes and layouts.
    """
    rows, size = x.shape
    num_experts, outs, _ = weights.shape
    _check(x, x_scales, weights, num_pairs, dtype, bias, scale, gate)
    check_loads(loads, num_experts)
    inner = outs // 2 if gate else outs
    out = torch.empty((num_pairs, inner), dtype=dtype, device=x.device)
    if out.numel():
        mapped, top_k = (mapped, 0) if isinstance(mapped, ExpertMap) else unmapped(mapped, num_pairs)
        x_group = 0 if x_scales is None or x_scales.shape[1] == 1 else weights.group
        in_tile, pdl = tiling.in_tile, supports_pdl(x.device)
        if x.element_size() == 1 and weights.group:
            in_tile = math.gcd(in_tile, weights.group)
        in_tile = min(in_tile, 64) if x.element_size() == 4 else in_tile  # which take twice the shared memory
        counts = top_k > 0 and loads is not None
        assembly = unpack_assembly(weights.kind, dtype, weights.zeros is None) if x.is_cuda else ""
        _grouped_quantized_kernel[(ceil_div(inner, tiling.out_tile), len(mapped.experts))](
            x, x if x_scales is None else x_scales, *pointers(weights), out if bias is None else bias,
            out if scale is None else scale, out, mapped.pairs, mapped.experts,
            mapped.experts if loads is None else loads, num_pairs, outs, num_pairs // rows,
            SIZE=size, CODES=int(weights.kind), GROUP=weights.group,
            EACH=math.gcd(in_tile, weights.group) if weights.group else in_tile, SCALES=weights.scales is not None,
            E8M0=weights.is_e8m0, ZEROS=weights.zeros is not None, ROW_SCALES=weights.row_scales is not None,
            SCALE_LAST=weights.group > 0 and weights.group % in_tile == 0, X_SCALES=x_scales is not None,
            X_GROUP=x_group, OUT_TILE=tiling.out_tile, IN_TILE=in_tile, TILE=mapped.tile, GATE=int(gate),
            BIAS=bias is not None, SCALE=scale is not None, SCALE_FIRST=scale_first, STAGES=tiling.stages,
            TOP_K=top_k, K_TILE=next_power_of_2(max(top_k, 1)), EXPERTS=num_experts if counts else 0,
            BINS=next_power_of_2(num_experts + 1), ASM=assembly, PDL=pdl, num_warps=tiling.warps,
            num_stages=tiling.stages, **pdl_options(pdl),
        )  # fmt: skip
    return out


def _check(
    x: Tensor, x_scales: Tensor | None, weights: PackedWeights, num_pairs: int, dtype: torch.dtype,
    bias: Tensor | None, scale: Tensor | None, gate: Gate,
) -> None:  # fmt: skip
    """Raises ValueError."""
    (rows, size), (_, outs, inputs) = x.shape, weights.shape
    weights.check()
    if inputs != size or (rows and num_pairs % rows) or (gate and outs % 2):
        raise ValueError(f"{num_pairs} pairs of rows {list(x.shape)} do not fit weights {list(weights.shape)}")
    if x_scales is None:
        is_right = x.dtype == dtype
    else:
        groups = x_scales.shape[1]
        is_right = x.dtype in (dtype, weights.codes.dtype) and (
            groups == 1 or (weights.group % FEWEST_INPUTS == 0 and groups == ceil_div(size, max(weights.group, 1)))
        )
        is_right = is_right and (weights.kind in (Codes.E4M3, Codes.INT8)) and x_scales.is_contiguous()
    if not is_right:
        raise ValueError(f"inputs {x.dtype} and their scales do not fit weights {weights.key} and a result {dtype}")
    if bias is not None and (bias.dtype != dtype or bias.shape != weights.shape[:2] or not bias.is_contiguous()):
        raise ValueError(f"a bias {list(bias.shape)} {bias.dtype} does not fit {list(weights.shape)} {dtype}")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != num_pairs or not scale.is_contiguous()):
        raise ValueError(f"scale must be {num_pairs} float32, got {list(scale.shape)} {scale.dtype}")
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
