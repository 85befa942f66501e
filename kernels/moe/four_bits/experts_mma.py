"""Products of experts with weights of 4 bits on tensor cores, for tiles of up to 16 pairs of row and expert; on a GPU.

The weight is the left operand, made in registers (`operands`). The warps of a program take the blocks of inputs in turn
and add their sums at the end, so that no step waits for another warp. A pair's sum has the same terms in the same order
beside any other pairs. Scales that the dtype of x cannot hold are the sum of two numbers of it. An RMSNorm of one or
two rows multiplies inputs by its weight, and sums by the rest, which is known at the end.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.few_rows import MAX_ROWS
from blockyard.kernels.moe.four_bits.operands import (
    along_2,
    along_4,
    block_of,
    code_layout,
    inverse_length,
    left_operand,
    load_factors,
    load_norm,
    load_words,
    load_x,
    right_operand,
    sum_factors,
    weight_rows,
    x_layout,
)
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import gate_values, unmapped
from blockyard.kernels.moe.map_experts import ExpertMap
from blockyard.kernels.moe.operand_checks import check_loads
from blockyard.kernels.programmatic_launch import pdl_options, prefetch, supports_pdl
from blockyard.kernels.quantized.packed_weights import Codes, PackedWeights
from blockyard.kernels.quantized.unpack_assembly import unpack_assembly
from blockyard.kernels.tensor_checks import check_tensor

CHUNK = 32  # inputs that a thread reads at once
BLOCK = 128  # inputs of a warp in a step
MOST_ALONE = 2  # rows without a map, whose pairs have tiles of their own: a search for equal experts takes longer
FETCHED = 4  # steps whose codes `row_sums` fetches before it waits
LAST = 128  # groups of a multiple of so many inputs: their scales multiply sums


@dataclass(frozen=True, slots=True)
class MmaTiling:
    """Powers of two."""

    out_tile: int  # rows of the weight that a program reads, at least 16: gate and up of half as many outputs
    warps: int
    ahead: int  # steps whose codes and inputs are loaded before they are used; at least 1


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
        return total + part * sum_factors(
            scales_ptr, row_scales_ptr, scale_ptr, step, expert, experts_ptr, start, inner, outs,
            SIZE, GROUP, SCALES, E8M0, ROW_SCALES, SCALE, TOP_K, GATE, W, R, C,
        )  # fmt: skip
    else:  # noqa: RET505, only one branch is compiled
        return mma_v2(left, right, total)


@gluon.jit
def _add_steps(
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
    ZEROS: gl.constexpr, ROW_SCALES: gl.constexpr, ASM: gl.constexpr, R: gl.constexpr, N: gl.constexpr,
    W: gl.constexpr, AHEAD: gl.constexpr, GATE: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr,
    SCALE_FIRST: gl.constexpr, TOP_K: gl.constexpr, K_TILE: gl.constexpr, ALONE: gl.constexpr, EXPERTS: gl.constexpr,
    BINS: gl.constexpr, PAIRS: gl.constexpr, NORM: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # program (i, j): rows i * R ... of an expert's weight, for the pairs of tile j; with TOP_K there is no map, and
    # pair j has tile j
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # now: the next kernel may read experts before it waits
    X: gl.constexpr = x_layout(W, N)
    OUTS: gl.constexpr = R // 2 if GATE else R
    Y: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, W], [0, 1])
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
    sums = _add_steps(
        x_ptr, norm_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, scale_ptr, row, expert, owners_ptr, start,
        inner, outs, first // pairs_of_row, eps,
        SIZE, GROUP, SCALES, E8M0, EXACT, ZEROS, NORM, ROW_SCALES, False, 0, GATE, ASM, W, R, N, AHEAD, X,
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


@gluon.jit
def _fetch_steps(
    codes_ptr, experts_ptr, start, outs,
    SIZE: gl.constexpr, TOP_K: gl.constexpr, EXPERTS: gl.constexpr, COUNT: gl.constexpr, W: gl.constexpr,
    R: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """Fetches the codes of the first COUNT steps to the L2 cache. Experts may be those of another step: then it is in
    vain."""
    S: gl.constexpr = gl.SliceLayout(2, C)
    BLOCKS: gl.constexpr = (SIZE + 127) // 128
    row = weight_rows(along_2(R, 1, S), start, outs, 0)
    for step in gl.static_range(COUNT):
        block, own, _ = block_of(step, along_2(W, 0, S), 0, experts_ptr, BLOCKS, W, TOP_K)
        own = gl.minimum(gl.maximum(own, 0), EXPERTS - 1)
        prefetch(codes_ptr + own * outs * (SIZE // 8) + (row * (SIZE // 8) + gl.minimum(block, BLOCKS - 1) * 16))


@gluon.jit
def _row_sums_kernel(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, bias_ptr, scale_ptr, experts_ptr, shared_ptr, add_ptr,
    out_ptr, outs,
    SIZE: gl.constexpr, GROUP: gl.constexpr, SCALES: gl.constexpr, E8M0: gl.constexpr, EXACT: gl.constexpr,
    ZEROS: gl.constexpr, ROW_SCALES: gl.constexpr, ASM: gl.constexpr, R: gl.constexpr, W: gl.constexpr,
    AHEAD: gl.constexpr, BIAS: gl.constexpr, SCALE: gl.constexpr, SHARED: gl.constexpr, ADD: gl.constexpr,
    TOP_K: gl.constexpr, EXPERTS: gl.constexpr, FETCH: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    # program (i, r): outputs i * R ... of row r; all columns are that row
    N: gl.constexpr = 8
    row = gl.program_id(1)
    own_ptr = experts_ptr + row * TOP_K
    start = gl.program_id(0) * R
    if PDL:
        gdc_launch_dependents()
        C: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])
        _fetch_steps(codes_ptr, own_ptr, start, outs, SIZE, TOP_K, EXPERTS, FETCH, W, R, C)
        gdc_wait()
    X: gl.constexpr = x_layout(W, N)
    S: gl.constexpr = gl.SliceLayout(0, gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8]))
    Y: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    rows = along_4(N, 3, X) * 0 + row * TOP_K
    sums = _add_steps(
        x_ptr, x_ptr, codes_ptr, scales_ptr, zeros_ptr, row_scales_ptr, scale_ptr + row * TOP_K, rows, 0, own_ptr,
        start, outs, outs, row, 0.0,
        SIZE, GROUP, SCALES, E8M0, EXACT, ZEROS, False, ROW_SCALES, SCALE, TOP_K, 0, ASM, W, R, N, AHEAD, X,
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


@dataclass(frozen=True, slots=True)
class MmaForm:
    """What kernels are compiled for, of weights that do not change. Made by `mma_form`."""

    assembly: str
    is_exact: bool  # the dtype of x has all scales


def mma_form(weights: PackedWeights, dtype: torch.dtype) -> MmaForm | None:
    """The form of these weights with rows of this dtype, None if the kernels do not multiply them. Reads a table back:
    not in steps."""
    zeros, scales, group = weights.zeros, weights.scales, weights.group
    if weights.kind > Codes.TABLE4 or weights.inputs % CHUNK or (zeros is not None and zeros.is_floating_point()):
        return None
    if group % LAST and group not in (16, 32, 64):
        return None
    is_exact = weights.is_e8m0 or (scales is not None and scales.dtype in (dtype, torch.float8_e4m3fn))
    if dtype == torch.float16 and group % LAST and (weights.is_e8m0 or not is_exact):
        return None  # their range
    table = None if weights.table is None else tuple(weights.table.tolist())
    assembly = unpack_assembly(weights.kind, dtype, zeros is None, table)
    return MmaForm(assembly, is_exact) if assembly else None


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
    _check(x, weights, num_pairs, bias, scale)
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
        x, x if norm is None else norm.weight, *_pointers(weights), out if bias is None else bias,
        out if scale is None else scale, out, mapped.pairs, mapped.experts, mapped.experts if loads is None else loads,
        num_pairs, outs, num_pairs // rows, 0.0 if norm is None else norm.eps,
        N=columns, GATE=int(gate), BIAS=bias is not None, SCALE=scale is not None, SCALE_FIRST=scale_first,
        TOP_K=top_k, K_TILE=next_power_of_2(max(top_k, 1)), ALONE=is_alone, NORM=norm is not None,
        EXPERTS=num_experts if counts else 0, BINS=next_power_of_2(num_experts + 1),
        PAIRS=next_power_of_2(max(num_pairs, 16)) if counts else 16,
        **_constants(x, weights, form, tiling),
    )  # fmt: skip
    return out


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
    _check(x, weights, num_pairs, bias, scale)
    for one in (shared, add_to):
        if one is not None and (one.shape != (rows, outs) or one.dtype != x.dtype or not one.is_contiguous()):
            raise ValueError(f"{list(one.shape)} {one.dtype} is not contiguous {[rows, outs]} {x.dtype}")
    out = torch.empty((rows, outs), dtype=x.dtype, device=x.device) if add_to is None else add_to
    if out.numel():
        steps = ceil_div(ceil_div(weights.inputs, BLOCK) * top_k, tiling.warps)
        _row_sums_kernel[(ceil_div(outs, tiling.out_tile), rows)](
            x, *_pointers(weights), out if bias is None else bias, out if scale is None else scale, experts,
            out if shared is None else shared, out, out, outs, BIAS=bias is not None, SCALE=scale is not None,
            SHARED=shared is not None, ADD=add_to is not None, TOP_K=top_k, EXPERTS=num_experts,
            FETCH=min(steps, FETCHED), **_constants(x, weights, form, tiling),
        )  # fmt: skip
    return out


def _pointers(weights: PackedWeights) -> list[Tensor]:
    """Codes as words, scales, zeros and scales of rows; codes in the place of what there is not."""
    codes = weights.codes.view(torch.int32)
    return [codes, *(codes if one is None else one for one in (weights.scales, weights.zeros, weights.row_scales))]


def _constants(x: Tensor, weights: PackedWeights, form: MmaForm, tiling: MmaTiling) -> dict[str, Any]:
    pdl = supports_pdl(x.device)
    return {
        "SIZE": weights.inputs,
        "GROUP": weights.group,
        "SCALES": weights.scales is not None,
        "E8M0": weights.is_e8m0,
        "EXACT": form.is_exact,
        "ZEROS": weights.zeros is not None,
        "ROW_SCALES": weights.row_scales is not None,
        "ASM": form.assembly,
        "R": tiling.out_tile,
        "W": tiling.warps,
        "AHEAD": tiling.ahead,
        "PDL": pdl,
        "num_warps": tiling.warps,
        **pdl_options(pdl),
    }


def _check(x: Tensor, weights: PackedWeights, num_pairs: int, bias: Tensor | None, scale: Tensor | None) -> None:
    """Raises ValueError."""
    weights.check()
    if x.shape[1] != weights.inputs or not x.is_contiguous():
        raise ValueError(f"rows {list(x.shape)} must be contiguous, of {weights.inputs} inputs")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != weights.shape[:2] or not bias.is_contiguous()):
        raise ValueError(f"a bias {list(bias.shape)} {bias.dtype} does not fit {list(weights.shape)} {x.dtype}")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != num_pairs or not scale.is_contiguous()):
        raise ValueError(f"scale must be {num_pairs} float32, got {list(scale.shape)} {scale.dtype}")
