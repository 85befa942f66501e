"""As `grouped_linear`, for steps of many rows: weights come through tensor descriptors (TMA); on a GPU.

The result of the first product may stay in the order of the map, where the pairs of a tile are adjacent: the second
product then copies them by a descriptor too, and gathers nothing. The last tile of an expert is often nearly empty, so
a tile with at most half, or at most a quarter, of its pairs is multiplied as one of that size. A pair's sum is in the
order of its inputs, whatever else is in its tile.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import gate_values, grouped_linear_reference, load_bias
from blockyard.kernels.moe.map_experts import ExpertMap

ALIGNMENT = 16  # bytes, of each row that a tensor descriptor copies
FEWEST_PAIRS = 16  # of a tile that is multiplied at once


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """Sizes of tiles, all powers of two; the tile of pairs is that of the map."""

    out_tile: int  # with a gate, of gate and up each
    in_tile: int
    stages: int
    warps: int
    parts: int = 1  # 2 or 4: tiles with at most a half (or a quarter) of their pairs are multiplied as smaller ones
    group: int = 1  # tiles of pairs whose programs take the same outputs one after the other
    weight_left: bool = True  # the left operand of the product; must be with `parts` that make tiles below 64 pairs
    descriptor: bool = True  # weights are copied by a tensor descriptor


def grouped_linear_prefill_reference(
    x: Tensor, weight: Tensor, mapped: ExpertMap, experts: Tensor, **options: Any
) -> Tensor:
    """The result in the order of the map, of x in the order of its rows; 0 where there is no pair."""
    out = grouped_linear_reference(x, weight, experts, **options)
    known = has_pair(mapped, len(out))
    result = out.new_zeros((len(mapped.pairs), out.shape[1]))
    result[known] = out[mapped.pairs[known].long()]
    return result


def has_pair(mapped: ExpertMap, num_pairs: int) -> Tensor:
    """Which places of a map have a pair, [len(mapped.pairs)] bool."""
    return (mapped.pairs < num_pairs) & (mapped.experts >= 0).repeat_interleave(mapped.tile)


@triton.jit
def _multiply(weight, x, total, WEIGHT_LEFT: tl.constexpr):
    """weight [outs, in], x [pairs, in] -> total + their product, [outs, pairs] or [pairs, outs]."""
    if WEIGHT_LEFT:
        return tl.dot(weight, x.T, total, input_precision="ieee")
    else:  # noqa: RET505, only one branch is compiled
        return tl.dot(x, weight.T, total, input_precision="ieee")


@triton.jit
def _tile_product(
    x_ptr, x_desc, weight_ptr, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, tile, expert, first_out,
    num_pairs, outs, size, pairs_of_row,
    OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, TILE: tl.constexpr, PAIRS: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, SCALE_FIRST: tl.constexpr, SORTED_IN: tl.constexpr,
    SORTED_OUT: tl.constexpr, WHOLE_IN: tl.constexpr, WEIGHT_LEFT: tl.constexpr, DESCRIPTOR: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The first PAIRS pairs of a tile times OUT_TILE outputs."""
    place = tile * TILE + tl.arange(0, PAIRS)
    pair = tl.load(pairs_ptr + place)
    known = pair < num_pairs
    inner = outs // 2 if GATE else outs
    out = first_out + tl.arange(0, OUT_TILE)
    cols = tl.arange(0, IN_TILE)
    first_row = expert * outs + first_out
    row = place if SORTED_IN else pair // pairs_of_row
    rows = x_ptr + row.to(tl.int64)[:, None] * size + cols[None, :]
    weights = weight_ptr + (expert.to(tl.int64) * outs + out)[:, None] * size + cols[None, :]
    total = tl.zeros([OUT_TILE, PAIRS] if WEIGHT_LEFT else [PAIRS, OUT_TILE], tl.float32)
    up_total = total
    for start in tl.range(0, size, IN_TILE, num_stages=STAGES):
        if SORTED_IN and PAIRS == TILE and DESCRIPTOR:
            x = x_desc.load([tile * TILE, start])
        elif WHOLE_IN:
            x = tl.load(rows + start, mask=known[:, None], other=0.0)
        else:
            x = tl.load(rows + start, mask=known[:, None] & (cols < size - start)[None, :], other=0.0)
        if DESCRIPTOR:
            weight = weight_desc.load([first_row, start])
        else:
            there = (out < inner)[:, None] & (cols < size - start)[None, :]
            weight = tl.load(weights + start, mask=there, other=0.0)
        total = _multiply(weight, x, total, WEIGHT_LEFT)
        if GATE:
            if DESCRIPTOR:
                up = weight_desc.load([first_row + inner, start])
            else:
                up = tl.load(weights + inner.to(tl.int64) * size + start, mask=there, other=0.0)
            up_total = _multiply(up, x, up_total, WEIGHT_LEFT)
    if not WEIGHT_LEFT:
        total = total.T
        up_total = up_total.T
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
    places = out_ptr + (place if SORTED_OUT else pair).to(tl.int64)[None, :] * inner + out[:, None]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=known[None, :] & (out < inner)[:, None])


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _grouped_linear_prefill_kernel(
    x_ptr, x_desc, weight_ptr, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, owners_ptr, num_pairs, num_tiles,
    outs, size, pairs_of_row,
    OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SCALE_FIRST: tl.constexpr, SORTED_IN: tl.constexpr,
    SORTED_OUT: tl.constexpr, WHOLE_IN: tl.constexpr, WEIGHT_LEFT: tl.constexpr, DESCRIPTOR: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # program i: GROUP tiles of pairs take the same outputs one after the other, then the next outputs
    inner = outs // 2 if GATE else outs
    out_tiles = tl.cdiv(inner, OUT_TILE)
    group = tl.program_id(0) // (GROUP * out_tiles)
    place = tl.program_id(0) % (GROUP * out_tiles)
    tile = group * GROUP + place % GROUP
    if tile >= num_tiles:
        return
    expert = tl.load(owners_ptr + tile)
    if expert < 0:
        return
    first_out = place // GROUP * OUT_TILE
    HALF: tl.constexpr = TILE // 2 if PARTS > 1 else TILE
    QUARTER: tl.constexpr = TILE // 4 if PARTS > 2 else TILE
    # pairs come before places without one
    over_half = tl.load(pairs_ptr + tile * TILE + (HALF if PARTS > 1 else 0)) < num_pairs
    over_quarter = tl.load(pairs_ptr + tile * TILE + (QUARTER if PARTS > 2 else 0)) < num_pairs
    if PARTS == 1 or over_half:
        _tile_product(
            x_ptr, x_desc, weight_ptr, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, tile, expert, first_out,
            num_pairs, outs, size, pairs_of_row, OUT_TILE, IN_TILE, TILE, TILE, GATE, BIAS, SCALE, SCALE_FIRST,
            SORTED_IN, SORTED_OUT, WHOLE_IN, WEIGHT_LEFT, DESCRIPTOR, STAGES,
        )  # fmt: skip
    elif PARTS == 2 or over_quarter:
        _tile_product(
            x_ptr, x_desc, weight_ptr, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, tile, expert, first_out,
            num_pairs, outs, size, pairs_of_row, OUT_TILE, IN_TILE, TILE, HALF, GATE, BIAS, SCALE, SCALE_FIRST,
            SORTED_IN, SORTED_OUT, WHOLE_IN, WEIGHT_LEFT, DESCRIPTOR, STAGES,
        )  # fmt: skip
    else:
        _tile_product(
            x_ptr, x_desc, weight_ptr, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, tile, expert, first_out,
            num_pairs, outs, size, pairs_of_row, OUT_TILE, IN_TILE, TILE, QUARTER, GATE, BIAS, SCALE, SCALE_FIRST,
            SORTED_IN, SORTED_OUT, WHOLE_IN, WEIGHT_LEFT, DESCRIPTOR, STAGES,
        )  # fmt: skip


def fits(weight: Tensor) -> bool:
    """Whether a tensor descriptor can copy tiles of weights [experts, out, in], and they are 16-bit numbers."""
    step = weight.shape[2] * weight.element_size()
    return weight.element_size() == 2 and step % ALIGNMENT == 0 and weight.data_ptr() % ALIGNMENT == 0


def grouped_linear_prefill(
    x: Tensor,
    weight: Tensor,
    mapped: ExpertMap,
    num_pairs: int,
    tiling: PrefillTiling,
    *,
    bias: Tensor | None = None,
    gate: Gate = Gate.NONE,
    scale: Tensor | None = None,
    scale_first: bool = False,
    sorted_in: bool = False,
    sorted_out: bool = False,
) -> Tensor:
    """As `grouped_linear`, but x and the result may be in the order of the map: place i has pair `mapped.pairs[i]`.

    sorted_in: x is [len(mapped.pairs), in]. sorted_out: the result is [len(mapped.pairs), out], and undefined where
    there is no pair. Weights are 16-bit numbers, and each of their rows is aligned to 16 bytes. Raises ValueError for
    other shapes, dtypes and layouts.
    """
    rows, size = x.shape
    num_experts, outs, in_features = weight.shape
    wrong_rows = rows != len(mapped.pairs) if sorted_in else bool(rows) and num_pairs % rows != 0
    if in_features != size or wrong_rows or (gate and outs % 2):
        raise ValueError(f"{num_pairs} pairs of rows {list(x.shape)} do not fit weights {list(weight.shape)}")
    if x.dtype != weight.dtype or (bias is not None and (bias.dtype != x.dtype or bias.shape != (num_experts, outs))):
        raise ValueError(f"dtypes differ, or a bias does not fit: {x.dtype}, {weight.dtype}")
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != num_pairs):
        raise ValueError(f"scale must be {num_pairs} float32, got {list(scale.shape)} {scale.dtype}")
    if not all(one.is_contiguous() for one in (x, weight, bias, scale) if one is not None):
        raise ValueError("operands must be contiguous")
    if tiling.descriptor and not (fits(weight) and fits(x[None])):
        raise ValueError(f"rows of {size} {weight.dtype} must be 16-bit numbers, aligned to {ALIGNMENT} bytes")
    inner, tiles = outs // 2 if gate else outs, len(mapped.experts)
    out = torch.empty((len(mapped.pairs) if sorted_out else num_pairs, inner), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    weight_desc = x_desc = None
    if tiling.descriptor:
        weight_desc = TensorDescriptor.from_tensor(weight.view(-1, size), [tiling.out_tile, tiling.in_tile])
        if sorted_in:
            x_desc = TensorDescriptor.from_tensor(x, [mapped.tile, tiling.in_tile])
    programs = ceil_div(tiles, tiling.group) * tiling.group * ceil_div(inner, tiling.out_tile)
    _grouped_linear_prefill_kernel[(programs,)](
        x, x_desc, weight, weight_desc, weight if bias is None else bias, weight if scale is None else scale, out,
        mapped.pairs, mapped.experts, num_pairs, tiles, outs, size, 1 if sorted_in else num_pairs // rows,
        OUT_TILE=tiling.out_tile, IN_TILE=tiling.in_tile, TILE=mapped.tile,
        PARTS=min(tiling.parts, mapped.tile // FEWEST_PAIRS), GROUP=tiling.group, GATE=int(gate),
        BIAS=bias is not None, SCALE=scale is not None, SCALE_FIRST=scale_first, SORTED_IN=sorted_in,
        SORTED_OUT=sorted_out, WHOLE_IN=size % tiling.in_tile == 0, WEIGHT_LEFT=tiling.weight_left,
        DESCRIPTOR=tiling.descriptor, STAGES=tiling.stages, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out
