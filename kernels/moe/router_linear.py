"""A router in float32 on rows of a 16-bit model: one kernel reads both as they are; on a GPU.

Up to `FEW_ROWS` rows, each program has a few experts and reads their weights once, straight to registers, as
`linear_skinny` does. More rows take tensor cores: each float32 weight is the sum of three bfloat16 numbers, whose
products with the bfloat16 rows are exact in float32. The sum over `in` is cut into parts, which the last program of a
tile adds in their order: the result is the same in every run.

With `pdl` (programmatic dependent launch, compute capability 9.0) the kernel starts while the kernel before it ends.
It reads first weights, or asks for them, then waits for that kernel.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.programmatic_launch import pdl_options, prefetch
from blockyard.kernels.tensor_checks import check_tensor

FEW_ROWS = 4  # up to them, no tensor cores are quicker
MOST_TILES = 132  # with sums in parts
_LANE = 4  # float32 numbers that a thread loads at once
_LINE = 32  # weights of a cache line
_MOST_LINES = 32  # of an expert that a program asks for before it waits; a power of two
_EARLY_ELEMENTS = 8192  # of the weights that a program of one row loads before it waits, at most


@dataclass(frozen=True, slots=True)
class RouterTiling:
    """Sizes of tiles on tensor cores, all powers of two, at least 16."""

    expert_tile: int
    row_tile: int
    in_tile: int
    stages: int
    warps: int
    programs: int = 132  # that the sums of tiles are divided among, at most


# of the measured shapes: 64 experts of 2,048 inputs and 256 of 7,168
_UP_TO_16_ROWS = RouterTiling(32, 16, 64, 4, 4, 264)
_BY_LOGITS = (  # most logits -> tiling
    (1 << 15, RouterTiling(16, 64, 128, 3, 4)),
    (1 << 18, RouterTiling(64, 128, 64, 3, 8)),
    (1 << 62, RouterTiling(128, 128, 32, 4, 8)),
)


def router_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.float(), weight)


@triton.jit(do_not_specialize=["rows"])
def _router_few_kernel(
    x_ptr, weight_ptr, out_ptr, rows, experts, size,
    ROWS: tl.constexpr, EXPERT_TILE: tl.constexpr, TILE: tl.constexpr, LANE: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # program i: experts i * EXPERT_TILE ... of all rows; EARLY tiles of weights are loaded before the wait
    if PDL:
        gdc_launch_dependents()
    expert = tl.program_id(0) * EXPERT_TILE + tl.arange(0, EXPERT_TILE)
    cols = tl.arange(0, TILE)
    weights = weight_ptr + expert[:, None] * size + cols[None, :]
    known = (expert < experts)[:, None]
    early = ()
    for i in tl.static_range(EARLY):
        inside = known & (i * TILE + cols < size)[None, :]
        early += (tl.load(weights + i * TILE, mask=inside, other=0.0),)  # type: ignore[assignment]
    if PDL:
        gdc_wait()
    totals = ()
    for row in tl.static_range(ROWS):
        total = tl.zeros([EXPERT_TILE, TILE // LANE], tl.float32)
        for i in tl.static_range(EARLY):
            col = i * TILE + cols
            x = tl.load(x_ptr + row * size + col, mask=col < tl.where(rows > row, size, 0), other=0.0).to(tl.float32)
            total += tl.sum(tl.reshape(early[i] * x[None, :], [EXPERT_TILE, TILE // LANE, LANE]), 2)
        totals += (total,)  # type: ignore[assignment]
    for start in range(EARLY * TILE, size, TILE):
        col = start + cols
        weight = tl.load(weights + start, mask=known & (col < size)[None, :], other=0.0)
        sums = ()
        for row in tl.static_range(ROWS):
            x = tl.load(x_ptr + row * size + col, mask=col < tl.where(rows > row, size, 0), other=0.0).to(tl.float32)
            products = tl.reshape(weight * x[None, :], [EXPERT_TILE, TILE // LANE, LANE])
            sums += (totals[row] + tl.sum(products, 2),)  # type: ignore[assignment]
        totals = sums
    for row in tl.static_range(ROWS):
        there = expert < tl.where(rows > row, experts, 0)
        tl.store(out_ptr + row * experts + expert, tl.sum(totals[row], 1), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _router_many_kernel(
    x_ptr, weight_ptr, out_ptr, parts_ptr, arrived_ptr, rows, experts, size,
    EXPERT_TILE: tl.constexpr, ROW_TILE: tl.constexpr, IN_TILE: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE_IN: tl.constexpr, FETCH: tl.constexpr, LINE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program (i, j, s): part s of the sums of experts i * EXPERT_TILE ... of rows j * ROW_TILE ...
    if PDL:
        gdc_launch_dependents()
    part = tl.program_id(2)
    expert = tl.program_id(0) * EXPERT_TILE + tl.arange(0, EXPERT_TILE)
    row = tl.program_id(1) * ROW_TILE + tl.arange(0, ROW_TILE)
    cols = tl.arange(0, IN_TILE)
    steps = tl.cdiv(size, IN_TILE)
    first, last = part * steps // SPLIT, (part + 1) * steps // SPLIT
    weights = weight_ptr + expert[:, None] * size + cols[None, :]
    if PDL:
        # cache lines of weights come to the L2 cache while the kernel waits
        lines = tl.minimum(first * IN_TILE + tl.arange(0, FETCH) * LINE, size - 1)
        prefetch(weight_ptr + tl.minimum(expert, experts - 1)[:, None] * size + lines[None, :])
        gdc_wait()
    xs = x_ptr + row.to(tl.int64)[:, None] * size + cols[None, :]
    total = tl.zeros([EXPERT_TILE, ROW_TILE], tl.float32)
    low_total = tl.zeros([EXPERT_TILE, ROW_TILE], tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        start = step * IN_TILE
        if WHOLE_IN:
            x = tl.load(xs + start, mask=(row < rows)[:, None], other=0.0)
            weight = tl.load(weights + start, mask=(expert < experts)[:, None], other=0.0)
        else:
            inside = (cols < size - start)[None, :]
            x = tl.load(xs + start, mask=(row < rows)[:, None] & inside, other=0.0)
            weight = tl.load(weights + start, mask=(expert < experts)[:, None] & inside, other=0.0)
        high = weight.to(x.dtype)
        rest = weight - high.to(tl.float32)
        middle = rest.to(x.dtype)
        low = (rest - middle.to(tl.float32)).to(x.dtype)
        # tensor cores cut sums off where others round: those of high parts are short, and added with rounding
        low_total = tl.dot(low, x.T, low_total)
        total += tl.dot(high, x.T, tl.dot(middle, x.T))
    total += low_total
    there = (expert < experts)[:, None] & (row < rows)[None, :]
    place = row.to(tl.int64)[None, :] * experts + expert[:, None]
    if SPLIT == 1:
        tl.store(out_ptr + place, total, mask=there)
    else:
        tl.store(parts_ptr + part * rows * experts + place, total, mask=there)
        tl.debug_barrier()  # stores of all threads come before the count
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            tl.debug_barrier()
            total = tl.zeros([EXPERT_TILE, ROW_TILE], tl.float32)
            for one in tl.static_range(SPLIT):  # all loads are under way at a time
                parts = parts_ptr + one * rows * experts + place
                total += tl.load(parts, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(out_ptr + place, total, mask=there)
            tl.store(arrived_ptr + tile, 0)


def takes(x: Tensor) -> bool:
    """Whether `router_linear` takes these rows: products with other dtypes than bfloat16 are not exact."""
    return x.dtype == torch.bfloat16 and x.is_contiguous()


def router_linear(
    x: Tensor,
    weight: Tensor,
    arrived: Tensor,
    *,
    pdl: bool,
    few: bool | None = None,
    tiling: RouterTiling | None = None,
) -> Tensor:
    """x [rows, in] bfloat16, weight [experts, in] float32, both contiguous -> [rows, experts] float32.

    As accurate as a product in float32. Rows may be float16, where the three parts of a weight are exact up to 3e-8.
    arrived: `MOST_TILES` int32 of one stream, 0 between calls. few, tiling: None takes the measured ones for the
    number of rows. Raises ValueError for other shapes, dtypes and layouts.
    """
    (rows, size), experts = x.shape, len(weight)
    check_tensor("rows", x, (rows, size), torch.bfloat16, torch.float16)
    check_tensor("weight", weight, (experts, size), torch.float32)
    check_tensor("arrived", arrived, (MOST_TILES,), torch.int32)
    out = torch.empty((rows, experts), dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    if few or (few is None and rows <= FEW_ROWS):
        _few(x, weight, out, pdl)
        return out
    if tiling is None:
        tiling = _pick_tiling(rows, experts)
    expert_tiles, row_tiles = ceil_div(experts, tiling.expert_tile), ceil_div(rows, tiling.row_tile)
    steps = ceil_div(size, tiling.in_tile)
    split = max(min(tiling.programs // (expert_tiles * row_tiles), steps), 1)
    fetch = min(next_power_of_2(ceil_div(steps, split) * tiling.in_tile // _LINE), _MOST_LINES)
    parts = torch.empty((split, rows, experts) if split > 1 else 1, dtype=torch.float32, device=x.device)
    _router_many_kernel[(expert_tiles, row_tiles, split)](
        x, weight, out, parts, arrived, rows, experts, size,
        EXPERT_TILE=tiling.expert_tile, ROW_TILE=tiling.row_tile, IN_TILE=tiling.in_tile, SPLIT=split,
        WHOLE_IN=size % tiling.in_tile == 0, FETCH=max(fetch, 1), LINE=_LINE,
        STAGES=tiling.stages, PDL=pdl, num_warps=tiling.warps, num_stages=tiling.stages, **pdl_options(pdl),
    )  # fmt: skip
    return out


def _pick_tiling(rows: int, experts: int) -> RouterTiling:
    if rows <= 16:
        return _UP_TO_16_ROWS
    return next(tiling for most, tiling in _BY_LOGITS if rows * experts <= most)


def _few(x: Tensor, weight: Tensor, out: Tensor, pdl: bool) -> None:
    (rows, size), experts = x.shape, len(weight)
    tile, padded = min(1024, max(next_power_of_2(size), _LANE)), next_power_of_2(rows)
    early = min(ceil_div(size, tile), max(_EARLY_ELEMENTS // max(padded // 4, 1) ** 2 // tile, 1))
    _router_few_kernel[(experts,)](
        x, weight, out, rows, experts, size,
        ROWS=padded, EXPERT_TILE=1, TILE=tile, LANE=_LANE, EARLY=early, PDL=pdl, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
