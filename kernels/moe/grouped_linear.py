"""Each tile of pairs times the weight of its expert, on tensor cores of a GPU.

Two products make the MLP of an expert: gate and up with the activation between them, which reads the rows of the batch,
and down with the routing weight, which reads the pairs that the first has written. The weight is the left operand, so
that few rows fill a tile. A pair's sum is in the order of its inputs, whatever else is in its tile.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.moe.few_rows import MAX_ROWS, store_loads, tile_pairs
from blockyard.kernels.moe.gates import Gate, gated
from blockyard.kernels.moe.map_experts import ExpertMap
from blockyard.kernels.moe.operand_checks import check_operands
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl


@dataclass(frozen=True, slots=True)
class GroupedTiling:
    """Sizes of tiles, all powers of two, at least 16; the tile of pairs is that of the map."""

    out_tile: int
    in_tile: int  # of 16-bit numbers; half of it for 32 bits, which take as much shared memory
    stages: int
    warps: int


def grouped_linear_reference(
    x: Tensor,
    weight: Tensor,
    experts: Tensor,
    *,
    bias: Tensor | None = None,
    gate: Gate = Gate.NONE,
    scale: Tensor | None = None,
    scale_first: bool = False,
) -> Tensor:
    """experts [pairs]; otherwise as `grouped_linear`."""
    flat = experts.flatten().long()
    rows = torch.arange(len(flat), device=x.device) // (len(flat) // max(len(x), 1))
    out = torch.empty(len(flat), weight.shape[1] // (1 if gate is Gate.NONE else 2), dtype=x.dtype, device=x.device)
    for expert in flat.unique().tolist():
        mine = flat == expert
        y = F.linear(x[rows[mine]].float(), weight[expert].float())
        factor = None if scale is None else scale.flatten()[mine, None]
        if factor is not None and scale_first:
            y = y * factor
        if bias is not None:
            y = y + bias[expert].float()
        y = gated(y, gate)
        out[mine] = (y if factor is None or scale_first else y * factor).to(x.dtype)
    return out


@triton.jit
def gate_values(left, up, GATE: tl.constexpr):
    """The activation of gate and up in float32, of the gate with this number."""
    if GATE == 1:
        return left / (1 + tl.exp(-left)) * up
    elif GATE == 2:  # noqa: RET505, only one branch is compiled
        inner = 0.7978845608028654 * (left + 0.044715 * left * left * left)
        return left / (1 + tl.exp(-2 * inner)) * up
    else:
        left = tl.minimum(left, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0)
        return left / (1 + tl.exp(-1.702 * left)) * (up + 1)


@triton.jit
def load_bias(bias_ptr, expert, first, out, inner, outs, BIAS: tl.constexpr):
    """The bias of outputs `out` behind `first` outputs of an expert, [outs, 1]; 0 without one."""
    if BIAS:
        return tl.load(bias_ptr + expert * outs + first + out, mask=out < inner, other=0.0).to(tl.float32)[:, None]
    else:  # noqa: RET505, only one branch is compiled
        return 0.0


@triton.jit(do_not_specialize=["num_pairs"])
def _grouped_linear_kernel(
    x_ptr, weight_ptr, bias_ptr, scale_ptr, out_ptr, pairs_ptr, owners_ptr, loads_ptr, num_pairs, outs, size,
    pairs_of_row,
    OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, TILE: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr,
    SCALE: tl.constexpr, SCALE_FIRST: tl.constexpr, STAGES: tl.constexpr, TOP_K: tl.constexpr, K_TILE: tl.constexpr,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, PDL: tl.constexpr,
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
    known = pair < num_pairs
    inner = outs // 2 if GATE else outs
    out = tl.program_id(0) * OUT_TILE + tl.arange(0, OUT_TILE)
    cols = tl.arange(0, IN_TILE)
    rows = x_ptr + (pair // pairs_of_row).to(tl.int64)[None, :] * size
    weights = weight_ptr + (expert * outs + out)[:, None] * size
    total = tl.zeros([OUT_TILE, TILE], tl.float32)
    up_total = tl.zeros([OUT_TILE, TILE], tl.float32)
    for start in tl.range(0, size, IN_TILE, num_stages=STAGES):
        col = start + cols
        x = tl.load(rows + col[:, None], mask=known[None, :] & (col < size)[:, None], other=0.0)
        there = (out < inner)[:, None] & (col < size)[None, :]
        total = tl.dot(tl.load(weights + col[None, :], mask=there, other=0.0), x, total, input_precision="ieee")
        if GATE:
            up = tl.load(weights + inner.to(tl.int64) * size + col[None, :], mask=there, other=0.0)
            up_total = tl.dot(up, x, up_total, input_precision="ieee")
    if SCALE:
        scale = tl.load(scale_ptr + pair, mask=known, other=0.0)[None, :]
        if SCALE_FIRST:
            total *= scale
            up_total *= scale
    total += load_bias(bias_ptr, expert, 0, out, inner, outs, BIAS)
    if GATE:
        total = gate_values(total, up_total + load_bias(bias_ptr, expert, inner, out, inner, outs, BIAS), GATE)
    if SCALE and not SCALE_FIRST:
        total *= scale
    places = out_ptr + pair.to(tl.int64)[None, :] * inner + out[:, None]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=known[None, :] & (out < inner)[:, None])


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    mapped: ExpertMap | Tensor,
    num_pairs: int,
    tiling: GroupedTiling,
    *,
    bias: Tensor | None = None,
    gate: Gate = Gate.NONE,
    scale: Tensor | None = None,
    scale_first: bool = False,
    loads: Tensor | None = None,
) -> Tensor:
    """x [rows, in] with `num_pairs` a multiple of the rows, weight [experts, out, in] -> [num_pairs, out].

    Pair p is of row p // (num_pairs // rows). With a gate, weight and bias [experts, out] have the gate's outputs first
    and then up's, and the result has out // 2. scale [num_pairs] float32 multiplies each result, or with `scale_first`
    the input. Sums are in float32. mapped: of the pairs; or, of at most MAX_ROWS rows, the experts [rows, top_k]
    themselves, different ones in a row, and then loads [experts] int32 gets the number of pairs of each expert. All
    tensors are contiguous. Raises ValueError for other shapes, dtypes and layouts.
    """
    rows, size = x.shape
    num_experts, outs, in_features = weight.shape
    if in_features != size or (rows and num_pairs % rows) or (gate and outs % 2):
        raise ValueError(f"{num_pairs} pairs of rows {list(x.shape)} do not fit weights {list(weight.shape)}")
    check_operands(x, weight, num_pairs, bias, scale)
    inner = outs // 2 if gate else outs
    out = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    if out.numel():
        mapped, top_k = (mapped, 0) if isinstance(mapped, ExpertMap) else unmapped(mapped, num_pairs)
        in_tile, pdl = max(2 * tiling.in_tile // max(x.element_size(), 2), 16), supports_pdl(x.device)
        counts = top_k > 0 and loads is not None
        _grouped_linear_kernel[(ceil_div(inner, tiling.out_tile), len(mapped.experts))](
            x, weight, weight if bias is None else bias, weight if scale is None else scale, out, mapped.pairs,
            mapped.experts, mapped.experts if loads is None else loads, num_pairs, outs, size, num_pairs // rows,
            OUT_TILE=tiling.out_tile, IN_TILE=in_tile, TILE=mapped.tile, GATE=int(gate), BIAS=bias is not None,
            SCALE=scale is not None, SCALE_FIRST=scale_first, STAGES=tiling.stages, TOP_K=top_k,
            K_TILE=next_power_of_2(max(top_k, 1)), EXPERTS=num_experts if counts else 0,
            BINS=next_power_of_2(num_experts + 1), PDL=pdl, num_warps=tiling.warps, num_stages=tiling.stages,
            **pdl_options(pdl),
        )  # fmt: skip
    return out


def unmapped(experts: Tensor, num_pairs: int) -> tuple[ExpertMap, int]:
    """The experts as a map with one tile a pair, and how many a row has. Raises ValueError if the rows are too many."""
    rows, top_k = experts.shape
    if rows > MAX_ROWS or experts.numel() != num_pairs or experts.dtype != torch.int32 or not experts.is_contiguous():
        raise ValueError(f"experts {list(experts.shape)} {experts.dtype} do not fit {num_pairs} pairs")
    return ExpertMap(experts, experts.flatten(), MAX_ROWS), top_k
