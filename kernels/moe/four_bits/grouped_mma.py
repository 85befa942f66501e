"""Products of experts with weights of 4 bits on tensor cores, in tiles of up to 16 pairs of row and expert.

An RMSNorm of one or two rows multiplies inputs by its weight, and sums by the rest, which is known at the end.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.few_rows import MAX_ROWS
from blockyard.kernels.moe.four_bits.mma_form import MmaForm, MmaTiling, check_operands, constants, pointers
from blockyard.kernels.moe.four_bits.operands import along_2, x_layout
from blockyard.kernels.moe.four_bits.product_steps import add_steps
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import gate_values, unmapped
from blockyard.kernels.moe.map_experts import ExpertMap
from blockyard.kernels.moe.operand_checks import check_loads
from blockyard.kernels.quantized.packed_weights import PackedWeights
from blockyard.kernels.tensor_checks import check_tensor

MOST_ALONE = 2  # rows without a map, whose pairs have tiles of their own: a search for equal experts takes longer


@gluon.jit
def _store_loads(experts_ptr, loads_ptr, num_pairs, EXPERTS: gl.constexpr, BINS: gl.constexpr, PAIRS: gl.constexpr):
    """As `few_rows.store_loads`."""
    if gl.program_id(0) + gl.program_id(1) == 0:
        L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        pair = gl.arange(0, PAIRS, L)
        expert = gl.load(experts_ptr + pair, mask=pair < num_pairs, other=BINS - 1)
        bins = gl.arange(0, BINS, L)
        gl.store(loads_ptr + bins, gl.histogram(expert, BINS, layout=L), mask=bins < EXPERTS)


@gluon.jit
def _pairs_of(
    owners_ptr, pairs_ptr, tile, num_pairs,
    TOP_K: gl.constexpr, K_TILE: gl.constexpr, ALONE: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The expert of a tile, its first pair, and its pairs [N]: as `few_rows.tile_pairs`. ALONE: a tile has one pair."""
    if ALONE:
        pairs = gl.where(gl.arange(0, N, LAYOUT) == 0, tile, num_pairs)
        return gl.load(owners_ptr + tile), tile, pairs
    elif TOP_K:  # noqa: RET505, only one branch is compiled
        T: gl.constexpr = gl.BlockedLayout([1, K_TILE], [32, 1], [gl.num_warps(), 1], [1, 0])
        k = along_2(K_TILE, 1, T)
        pair = along_2(N, 0, T) * TOP_K + k
        inside = (pair < num_pairs) & (k < TOP_K)
        expert = gl.load(owners_ptr + tile)
        mine = (gl.load(owners_ptr + pair, mask=inside, other=-1) == expert) & inside
        pairs = gl.min(gl.where(mine, pair, num_pairs), 1)
        first = gl.min(pairs, 0)
        return gl.where(first == tile, expert, -1), first, gl.convert_layout(pairs, LAYOUT)
    else:
        pairs = gl.load(pairs_ptr + tile * N + gl.arange(0, N, LAYOUT))
        return gl.load(owners_ptr + tile), gl.load(pairs_ptr + tile * N), pairs


@gluon.jit
def _finished(
    sums, row_scales_ptr, bias_ptr, expert, first, out, inner, outs, scale,
    ROW_SCALES: gl.constexpr, BIAS: gl.constexpr, SCALE_FIRST: gl.constexpr,
):  # fmt: skip
    """Sums [outputs, pairs] with what comes before the gate. first: the row of the weight of output 0."""
    place = expert * outs + first + out
    if ROW_SCALES:
        sums *= gl.load(row_scales_ptr + place, mask=out < inner, other=0.0).to(gl.float32)
    if SCALE_FIRST:
        sums *= scale
    if BIAS:
        sums += gl.load(bias_ptr + place, mask=out < inner, other=0.0).to(gl.float32)
    return sums


@gluon.jit(do_not_specialize=["num_pairs"])
def _experts_mma_kernel(
    x_ptr, norm_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, bias_ptr, scale_ptr, out_ptr, pairs_ptr,
    owners_ptr, loads_ptr, num_pairs, outs, pairs_of_row, eps,
    SIZE: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr,
    SMALL: gl.constexpr, ZEROS: gl.constexpr, ROW_SCALES: gl.constexpr, ASM: gl.constexpr, R: gl.constexpr,
    N: gl.constexpr, W: gl.constexpr, AHEAD: gl.constexpr, COPIES: gl.constexpr, V: gl.constexpr,
    GATE: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr, SCALE_FIRST: gl.constexpr, TOP_K: gl.constexpr,
    K_TILE: gl.constexpr, ALONE: gl.constexpr, EXPERTS: gl.constexpr, BINS: gl.constexpr, PAIRS: gl.constexpr,
    NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # program (i, j): rows i * R ... of an expert's weight, for the pairs of tile j; with TOP_K there is no map, and
    # pair j has tile j
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # now: the next kernel may read experts before it waits
    X: gl.constexpr = x_layout(W, V, N)
    OUTS: gl.constexpr = R // 2 if GATE else R
    Y: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, gl.num_warps()], [0, 1])
    tile = gl.program_id(1)
    if EXPERTS:
        _store_loads(owners_ptr, loads_ptr, num_pairs, EXPERTS, BINS, PAIRS)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, X)))
    owner, first, pairs = _pairs_of(owners_ptr, pairs_ptr, tile, num_pairs, TOP_K, K_TILE, ALONE, N, COLUMNS)
    if owner < 0:
        return
    expert = owner.to(gl.int64)
    inner = outs // 2 if GATE else outs
    start = gl.program_id(0) * OUTS
    # columns without a pair read what another column reads
    row = gl.where(pairs < num_pairs, pairs, first) // pairs_of_row
    row = gl.expand_dims(gl.expand_dims(gl.expand_dims(row, 0), 1), 2)
    sums = add_steps(
        x_ptr, norm_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, scale_ptr, row, expert, owners_ptr, start,
        inner, outs, first // pairs_of_row, eps,
        SIZE, GROUP, SCALES, E8M0, EXACT, SMALL, ZEROS, NORM, ROW_SCALES, False, 0, GATE, ASM, W, R, N, AHEAD, X,
        COPIES, V,
    )  # fmt: skip
    pair = gl.expand_dims(gl.convert_layout(pairs, gl.SliceLayout(0, Y)), 0)
    here = pair < num_pairs
    out = start + along_2(OUTS, 0, Y)
    scale = 1.0
    if SCALE:
        scale = gl.load(scale_ptr + pair, mask=here, other=0.0)
    if GATE:
        both = gl.permute(gl.reshape(sums, [R // 16, 2, 8, N]), (0, 2, 3, 1))
        left, up = gl.split(both)
        left = gl.convert_layout(gl.reshape(left, [OUTS, N]), Y)
        up = gl.convert_layout(gl.reshape(up, [OUTS, N]), Y)
        left = _finished(
            left, row_scales_ptr, bias_ptr, expert, 0, out, inner, outs, scale, ROW_SCALES, BIAS, SCALE_FIRST
        )
        up = _finished(
            up, row_scales_ptr, bias_ptr, expert, inner, out, inner, outs, scale, ROW_SCALES, BIAS, SCALE_FIRST
        )
        y = gate_values(left, up, GATE)
    else:
        sums = gl.convert_layout(sums, Y)
        y = _finished(sums, row_scales_ptr, bias_ptr, expert, 0, out, inner, outs, scale, ROW_SCALES, BIAS, SCALE_FIRST)
    if SCALE and not SCALE_FIRST:
        y *= scale
    place = out_ptr + pair.to(gl.int64) * inner + out
    gl.store(place, y.to(out_ptr.dtype.element_ty), mask=here & (out < inner))


def grouped_mma(
    x: Tensor,
    weights: PackedWeights,
    form: MmaForm,
    mapped: ExpertMap | Tensor,
    num_pairs: int,
    tiling: MmaTiling,
    *,
    norm: RMSNorm | None = None,
    bias: Tensor | None = None,
    gate: Gate = Gate.NONE,
    scale: Tensor | None = None,
    scale_first: bool = False,
    loads: Tensor | None = None,
) -> Tensor:
    """Computes `grouped_linear` with these weights. form: of them. A map has tiles of 8 or 16 pairs.

    norm: x is normalised first, of MOST_ALONE bfloat16 rows at most without a map; its weight may be float32. Raises
    ValueError for other shapes, dtypes and layouts.
    """
    rows, (num_experts, outs, _) = len(x), weights.shape
    if (rows and num_pairs % rows) or (gate and outs % 2):
        raise ValueError(f"{num_pairs} pairs of rows {list(x.shape)} do not fit weights {list(weights.shape)}")
    check_operands(x, weights, num_pairs, bias, scale)
    check_loads(loads, num_experts)
    inner = outs // 2 if gate else outs
    out = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    if isinstance(mapped, ExpertMap):
        top_k, columns = 0, mapped.tile
    else:
        mapped, top_k = unmapped(mapped, num_pairs)
        columns = 8 if rows <= 8 else MAX_ROWS
    if columns not in (8, 16):
        raise ValueError(f"tiles of a map must have 8 or 16 pairs, got {columns}")
    counts, programs = top_k > 0 and loads is not None, ceil_div(outs, tiling.out_tile)
    is_alone = top_k > 0 and rows <= MOST_ALONE
    if norm is not None:
        check_tensor("the norm's weight", norm.weight, (weights.inputs,), x.dtype, torch.float32)
        if not is_alone or x.dtype != torch.bfloat16:  # products with the weight alone leave the range of float16
            raise ValueError(f"{rows} rows of {x.dtype} are not normalised")
    _experts_mma_kernel[(programs, len(mapped.experts))](
        x, x if norm is None else norm.weight, *pointers(weights), out if bias is None else bias,
        out if scale is None else scale, out, mapped.pairs, mapped.experts, mapped.experts if loads is None else loads,
        num_pairs, outs, num_pairs // rows, 0.0 if norm is None else norm.eps,
        N=columns, GATE=int(gate), BIAS=bias is not None, SCALE=scale is not None, SCALE_FIRST=scale_first,
        TOP_K=top_k, K_TILE=next_power_of_2(max(top_k, 1)), ALONE=is_alone, NORM=norm is not None,
        EXPERTS=num_experts if counts else 0, BINS=next_power_of_2(num_experts + 1),
        PAIRS=next_power_of_2(max(num_pairs, 16)) if counts else 16,
        **constants(x, weights, form, tiling),
    )  # fmt: skip
    return out
