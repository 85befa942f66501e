"""The pairs of row and expert, sorted by expert and padded to tiles of one expert each, on a GPU.

Few pairs take one kernel: one program an expert counts the pairs of all experts before it, and writes its own pairs in
their order. Many pairs take two: one program for each chunk of pairs counts them, then each program sorts its chunk and
writes it behind what earlier chunks have of each expert. Programs of a kernel share nothing, so there are no atomics,
and the map is the same in every run.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.moe.operand_checks import check_loads
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl

_CHUNK = 2048  # pairs that a program of the one kernel looks at together
FEW_PAIRS = 8192  # up to it, one kernel is quicker
_SORTED = 512  # pairs of a chunk that is sorted


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """Tile i has the pairs [i * tile, (i + 1) * tile) of `pairs`, all of expert `experts[i]`.

    Pair row * top_k + j is the j-th expert of a row. Places without a pair have the number of all pairs, and tiles
    without one have the expert -1.
    """

    pairs: Tensor  # [tiles * tile] int32
    experts: Tensor  # [tiles] int32
    tile: int


def most_tiles(num_pairs: int, num_experts: int, tile: int) -> int:
    """How many tiles there may be, whatever the experts of the pairs."""
    partial = min(num_pairs, num_experts)
    return partial + (num_pairs - partial) // tile


def map_experts_reference(experts: Tensor, num_experts: int, tile: int) -> ExpertMap:
    num_pairs = experts.numel()
    tiles = most_tiles(num_pairs, num_experts, tile)
    pairs = torch.full((tiles, tile), num_pairs, dtype=torch.int32)
    owners = torch.full((tiles,), -1, dtype=torch.int32)
    used = 0
    for expert in range(num_experts):
        own = (experts.flatten().cpu() == expert).nonzero()[:, 0].int()
        for start in range(0, len(own), tile):
            some = own[start : start + tile]
            pairs[used, : len(some)] = some
            owners[used] = expert
            used += 1
    return ExpertMap(pairs.flatten().to(experts.device), owners.to(experts.device), tile)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _map_experts_kernel(
    experts_ptr, pairs_ptr, owners_ptr, loads_ptr, num_pairs, num_tiles,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    TILE_STEP: tl.constexpr, LOADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # program e: expert e; the program after the last expert marks the tiles that are left
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=BINS - 1)
        counts += tl.histogram(expert, BINS)
    tiles = tl.where(bins < EXPERTS, (counts + TILE - 1) // TILE, 0)
    first = tl.sum(tl.where(bins < own, tiles, 0), 0)
    last = first + tl.sum(tl.where(bins == own, tiles, 0), 0)
    if own == EXPERTS:
        last = num_tiles
        if LOADS:
            tl.store(loads_ptr + bins, counts, mask=bins < EXPERTS)
    for start in range(first, last, TILE_STEP):
        tile = start + tl.arange(0, TILE_STEP)
        tl.store(owners_ptr + tile, tl.where(own == EXPERTS, -1, own), mask=tile < last)
    if own < EXPERTS:
        done = first * TILE
        for start in range(0, num_pairs, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=BINS - 1)
            mine = (expert == own).to(tl.int32)
            place = done + tl.cumsum(mine, 0) - 1
            tl.store(pairs_ptr + place, pair, mask=mine > 0)
            done += tl.sum(mine, 0)
        padding = done + tl.arange(0, PADDED)
        tl.store(pairs_ptr + padding, num_pairs, mask=padding < last * TILE)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_chunks_kernel(experts_ptr, counts_ptr, num_pairs, BINS: tl.constexpr, CHUNK: tl.constexpr):
    # program c: the pairs of chunk c of each expert
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=BINS - 1)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(expert, BINS))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles", "num_chunks"])
def _place_chunks_kernel(
    experts_ptr, counts_ptr, pairs_ptr, owners_ptr, loads_ptr, num_pairs, num_tiles, num_chunks,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr,
    STEP: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    # program c: chunk c; the programs share the tiles' experts and the places without a pair
    own, programs = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, BINS)
    before = tl.zeros([BINS], tl.int32)
    total = tl.zeros([BINS], tl.int32)
    for start in range(0, num_chunks, STEP):
        chunk = start + tl.arange(0, STEP)
        counts = tl.load(
            counts_ptr + chunk[:, None] * BINS + bins[None, :], mask=(chunk < num_chunks)[:, None], other=0
        )
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((chunk < own)[:, None], counts, 0), 0)
    if LOADS:  # noqa: SIM102, known when compiled
        if own == 0:
            tl.store(loads_ptr + bins, total, mask=bins < EXPERTS)
    tiles = tl.where(bins < EXPERTS, (total + TILE - 1) // TILE, 0)
    last = tl.cumsum(tiles, 0)  # tiles up to and with an expert's
    place = (last - tiles) * TILE
    mine = tl.load(counts_ptr + own * BINS + bins)
    pair = own * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=BINS - 1)
    order = tl.sort(expert * CHUNK + tl.arange(0, CHUNK))
    expert = order // CHUNK
    offset = tl.gather(place + before - (tl.cumsum(mine, 0) - mine), expert, 0) + tl.arange(0, CHUNK)
    tl.store(pairs_ptr + offset, own * CHUNK + order % CHUNK, mask=expert < EXPERTS)
    for one in range(own, EXPERTS, programs):
        begin = tl.sum(tl.where(bins == one, place + total, 0), 0)
        end = tl.sum(tl.where(bins == one, last, 0), 0) * TILE
        padding = begin + tl.arange(0, PADDED)
        tl.store(pairs_ptr + padding, num_pairs, mask=padding < end)
    for tile in range(own, num_tiles, programs):
        owner = tl.sum((last <= tile).to(tl.int32), 0)  # experts whose tiles all come before; unused bins count too
        tl.store(owners_ptr + tile, tl.where(owner < EXPERTS, owner, -1))


def map_experts(
    experts: Tensor, num_experts: int, tile: int, loads: Tensor | None = None, *, overlaps: bool = True
) -> ExpertMap:
    """experts [rows, top_k] int32, contiguous, each from 0 to num_experts; tile: at least 1.

    Pairs of the number `num_experts`, which is no expert, are in no tile.

    loads [num_experts] int32, contiguous, gets the number of pairs of each expert, if there are rows. The number of
    tiles follows from the shape of `experts` alone. overlaps: the next kernel may begin while this one runs. Raises
    ValueError for another dtype or layout.
    """
    check_loads(loads, num_experts)
    if experts.dtype != torch.int32 or not experts.is_contiguous():
        raise ValueError(f"experts must be contiguous int32, got {experts.dtype} with strides {experts.stride()}")
    num_pairs = experts.numel()
    tiles = most_tiles(num_pairs, num_experts, tile)
    pairs = torch.empty(tiles * tile, dtype=torch.int32, device=experts.device)
    owners = torch.empty(tiles, dtype=torch.int32, device=experts.device)
    if num_pairs > FEW_PAIRS:
        _map_many(experts, pairs, owners, loads, num_experts, tile)
    elif num_pairs:
        chunk = min(_CHUNK, max(next_power_of_2(num_pairs), 16))
        pdl = overlaps and supports_pdl(experts.device)
        _map_experts_kernel[(num_experts + 1,)](
            experts, pairs, owners, pairs if loads is None else loads, num_pairs, tiles,
            EXPERTS=num_experts, BINS=next_power_of_2(num_experts + 1), TILE=tile, PADDED=next_power_of_2(tile),
            CHUNK=chunk, TILE_STEP=min(next_power_of_2(tiles), 256), LOADS=loads is not None, PDL=pdl,
            num_warps=4 if chunk > 256 else 1, **pdl_options(pdl),
        )  # fmt: skip
    return ExpertMap(pairs, owners, tile)


def _map_many(
    experts: Tensor, pairs: Tensor, owners: Tensor, loads: Tensor | None, num_experts: int, tile: int
) -> None:
    num_pairs, bins = experts.numel(), next_power_of_2(num_experts + 1)
    chunks = ceil_div(num_pairs, _SORTED)
    counts = torch.empty((chunks, bins), dtype=torch.int32, device=experts.device)
    _count_chunks_kernel[(chunks,)](experts, counts, num_pairs, BINS=bins, CHUNK=_SORTED, num_warps=4)
    _place_chunks_kernel[(chunks,)](
        experts, counts, pairs, owners, pairs if loads is None else loads, num_pairs, len(owners), chunks,
        EXPERTS=num_experts, BINS=bins, TILE=tile, PADDED=next_power_of_2(tile), CHUNK=_SORTED,
        STEP=16, LOADS=loads is not None, num_warps=4,
    )  # fmt: skip
