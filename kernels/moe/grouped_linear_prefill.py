"""Computes `grouped_linear` for steps of many rows: weights come through tensor descriptors (TMA); on a GPU.

Each weight that a program loads is multiplied by up to 192 pairs of an expert: 128 and, where there are more, a piece
of 64 or 32 beside them. A tile with fewer pairs is multiplied as one of 128, 64 or 32. The result of the first product
may stay in the order of the map, where the pairs of a tile are adjacent: the second product copies them by descriptors
too, and gathers nothing. A pair's sum is in the order of its inputs, whatever else is in its tile.
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
from blockyard.kernels.moe.operand_checks import check_operands

ALIGNMENT = 16  # bytes, of each row that a tensor descriptor copies
PIECES = (128, 64, 32)  # pairs that are multiplied at once
TILE = 192  # of pairs: the first piece, and beside it one of the others


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """Sizes of tiles, powers of two; the tile of pairs is that of the map."""

    out_tile: int  # with a gate, of gate and up each
    in_tile: int
    stages: int
    warps: int
    group: int = 1  # tiles of pairs whose programs take the same outputs one after the other


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
def _pointers(
    x_ptr, pairs_ptr, first, num_pairs, size, pairs_of_row,
    PAIRS: tl.constexpr, IN_TILE: tl.constexpr, SORTED_IN: tl.constexpr,
):  # fmt: skip
    """Pointers to the first inputs of PAIRS places from `first` on, and which of them have a pair."""
    if SORTED_IN:
        return x_ptr, True
    else:  # noqa: RET505, only one branch is compiled
        pair = tl.load(pairs_ptr + first + tl.arange(0, PAIRS))
        row = (pair // pairs_of_row).to(tl.int64)
        return x_ptr + row[:, None] * size + tl.arange(0, IN_TILE)[None, :], (pair < num_pairs)[:, None]


@triton.jit
def _load_rows(
    x_desc, rows, known, first, start, size,
    IN_TILE: tl.constexpr, SORTED_IN: tl.constexpr, WHOLE_IN: tl.constexpr,
):  # fmt: skip
    """Inputs `start` to `start` + IN_TILE of a piece, [pairs, in]. Where there is no pair they are anything."""
    if SORTED_IN:
        return x_desc.load([first, start])
    elif WHOLE_IN:  # noqa: RET505, only one branch is compiled
        return tl.load(rows + start, mask=known, other=0.0)
    else:
        inside = known & (tl.arange(0, IN_TILE) < size - start)[None, :]
        return tl.load(rows + start, mask=inside, other=0.0)


@triton.jit
def _store(
    total, up_total, bias_ptr, scale_ptr, out_ptr, pairs_ptr, first, num_pairs, expert, first_out, outs,
    GATE: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, SCALE_FIRST: tl.constexpr, SORTED_OUT: tl.constexpr,
):  # fmt: skip
    """Stores a piece, [outs, pairs], after bias, gate and routing weight."""
    inner = outs // 2 if GATE else outs
    out = first_out + tl.arange(0, total.shape[0])
    pair = tl.load(pairs_ptr + first + tl.arange(0, total.shape[1]))  # again: kept, it would hold registers
    known = pair < num_pairs
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
    place = first + tl.arange(0, total.shape[1]) if SORTED_OUT else pair
    places = out_ptr + place.to(tl.int64)[None, :] * inner + out[:, None]
    tl.store(places, total.to(out_ptr.dtype.element_ty), mask=known[None, :] & (out < inner)[:, None])


@triton.jit
def _multiply(
    x_ptr, x_desc, more_desc, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, first, expert, first_out,
    num_pairs, outs, size, pairs_of_row,
    PAIRS: tl.constexpr, MORE: tl.constexpr, OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, SCALE_FIRST: tl.constexpr, SORTED_IN: tl.constexpr,
    SORTED_OUT: tl.constexpr, WHOLE_IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """PAIRS pairs from place `first` on, and MORE behind them, times OUT_TILE outputs."""
    rows, known = _pointers(x_ptr, pairs_ptr, first, num_pairs, size, pairs_of_row, PAIRS, IN_TILE, SORTED_IN)
    total = tl.zeros([OUT_TILE, PAIRS], tl.float32)
    up_total = tl.zeros([OUT_TILE, PAIRS], tl.float32)
    if MORE:
        more_rows, more_known = _pointers(
            x_ptr, pairs_ptr, first + PAIRS, num_pairs, size, pairs_of_row, MORE, IN_TILE, SORTED_IN
        )  # fmt: skip
        more_total = tl.zeros([OUT_TILE, MORE], tl.float32)
        more_up = tl.zeros([OUT_TILE, MORE], tl.float32)
    gate_row = expert * outs + first_out
    for start in tl.range(0, size, IN_TILE, num_stages=STAGES):
        x = _load_rows(x_desc, rows, known, first, start, size, IN_TILE, SORTED_IN, WHOLE_IN)
        weight = weight_desc.load([gate_row, start])
        total = tl.dot(weight, x.T, total)
        if MORE:
            y = _load_rows(more_desc, more_rows, more_known, first + PAIRS, start, size, IN_TILE, SORTED_IN, WHOLE_IN)
            more_total = tl.dot(weight, y.T, more_total)
        if GATE:
            up = weight_desc.load([gate_row + outs // 2, start])
            up_total = tl.dot(up, x.T, up_total)
            if MORE:
                more_up = tl.dot(up, y.T, more_up)
    _store(
        total, up_total, bias_ptr, scale_ptr, out_ptr, pairs_ptr, first, num_pairs, expert, first_out, outs,
        GATE, BIAS, SCALE, SCALE_FIRST, SORTED_OUT,
    )  # fmt: skip
    if MORE:
        _store(
            more_total, more_up, bias_ptr, scale_ptr, out_ptr, pairs_ptr, first + PAIRS, num_pairs, expert, first_out,
            outs, GATE, BIAS, SCALE, SCALE_FIRST, SORTED_OUT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _grouped_linear_prefill_kernel(
    x_ptr, x_desc, half_desc, quarter_desc, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, owners_ptr, num_pairs,
    num_tiles, outs, size, pairs_of_row,
    TILE: tl.constexpr, OUT_TILE: tl.constexpr, IN_TILE: tl.constexpr, GROUP: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, SCALE: tl.constexpr, SCALE_FIRST: tl.constexpr, SORTED_IN: tl.constexpr,
    SORTED_OUT: tl.constexpr, WHOLE_IN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # program i: GROUP tiles of pairs take the same outputs one after the other, then the next outputs
    out_tiles = tl.cdiv(outs // 2 if GATE else outs, OUT_TILE)
    place = tl.program_id(0) % (GROUP * out_tiles)
    tile = tl.program_id(0) // (GROUP * out_tiles) * GROUP + place % GROUP
    if tile >= num_tiles:
        return
    expert = tl.load(owners_ptr + tile)
    if expert < 0:
        return
    first, first_out = tile * TILE, place // GROUP * OUT_TILE
    # pairs come before places without one
    if tl.load(pairs_ptr + first + 160) < num_pairs:
        _multiply(
            x_ptr, x_desc, half_desc, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, first, expert, first_out,
            num_pairs, outs, size, pairs_of_row, 128, 64, OUT_TILE, IN_TILE, GATE, BIAS, SCALE, SCALE_FIRST, SORTED_IN,
            SORTED_OUT, WHOLE_IN, STAGES,
        )  # fmt: skip
    elif tl.load(pairs_ptr + first + 128) < num_pairs:
        _multiply(
            x_ptr, x_desc, quarter_desc, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, first, expert, first_out,
            num_pairs, outs, size, pairs_of_row, 128, 32, OUT_TILE, IN_TILE, GATE, BIAS, SCALE, SCALE_FIRST, SORTED_IN,
            SORTED_OUT, WHOLE_IN, STAGES,
        )  # fmt: skip
    elif tl.load(pairs_ptr + first + 64) < num_pairs:
        _multiply(
            x_ptr, x_desc, x_desc, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, first, expert, first_out,
            num_pairs, outs, size, pairs_of_row, 128, 0, OUT_TILE, IN_TILE, GATE, BIAS, SCALE, SCALE_FIRST, SORTED_IN,
            SORTED_OUT, WHOLE_IN, STAGES,
        )  # fmt: skip
    elif tl.load(pairs_ptr + first + 32) < num_pairs:
        _multiply(
            x_ptr, half_desc, half_desc, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, first, expert, first_out,
            num_pairs, outs, size, pairs_of_row, 64, 0, OUT_TILE, IN_TILE, GATE, BIAS, SCALE, SCALE_FIRST, SORTED_IN,
            SORTED_OUT, WHOLE_IN, STAGES,
        )  # fmt: skip
    else:
        _multiply(
            x_ptr, quarter_desc, quarter_desc, weight_desc, bias_ptr, scale_ptr, out_ptr, pairs_ptr, first, expert,
            first_out, num_pairs, outs, size, pairs_of_row, 32, 0, OUT_TILE, IN_TILE, GATE, BIAS, SCALE, SCALE_FIRST,
            SORTED_IN, SORTED_OUT, WHOLE_IN, STAGES,
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
    """Computes `grouped_linear`, but x and the result may be in the map's order: place i has pair `mapped.pairs[i]`.

    sorted_in: x is [len(mapped.pairs), in]. sorted_out: the result is [len(mapped.pairs), out], and undefined where
    there is no pair. Weights are 16-bit numbers, and each of their rows is aligned to 16 bytes. Raises ValueError for
    other shapes, dtypes and layouts.
    """
    rows, size = x.shape
    _, outs, in_features = weight.shape
    wrong_rows = rows != len(mapped.pairs) if sorted_in else bool(rows) and num_pairs % rows != 0
    if in_features != size or wrong_rows or (gate and outs % 2):
        raise ValueError(f"{num_pairs} pairs of rows {list(x.shape)} do not fit weights {list(weight.shape)}")
    check_operands(x, weight, num_pairs, bias, scale)
    if not (fits(weight) and fits(x[None])):
        raise ValueError(f"rows of {size} {weight.dtype} must be 16-bit numbers, aligned to {ALIGNMENT} bytes")
    if mapped.tile != TILE:
        raise ValueError(f"tiles must be of {TILE} pairs, got {mapped.tile}")
    inner, tiles = outs // 2 if gate else outs, len(mapped.experts)
    out = torch.empty((len(mapped.pairs) if sorted_out else num_pairs, inner), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    x_descs = [TensorDescriptor.from_tensor(x, [piece, tiling.in_tile]) if sorted_in else None for piece in PIECES]
    weight_desc = TensorDescriptor.from_tensor(weight.view(-1, size), [tiling.out_tile, tiling.in_tile])
    programs = ceil_div(tiles, tiling.group) * tiling.group * ceil_div(inner, tiling.out_tile)
    _grouped_linear_prefill_kernel[(programs,)](
        x, *x_descs, weight_desc, weight if bias is None else bias, weight if scale is None else scale, out,
        mapped.pairs, mapped.experts, num_pairs, tiles, outs, size, 1 if sorted_in else num_pairs // rows,
        TILE=TILE, OUT_TILE=tiling.out_tile, IN_TILE=tiling.in_tile, GROUP=tiling.group, GATE=int(gate),
        BIAS=bias is not None, SCALE=scale is not None, SCALE_FIRST=scale_first, SORTED_IN=sorted_in,
        SORTED_OUT=sorted_out, WHOLE_IN=size % tiling.in_tile == 0, STAGES=tiling.stages, num_warps=tiling.warps,
        num_stages=tiling.stages,
    )  # fmt: skip
    return out
