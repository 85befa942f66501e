"""The products of adapters on a GPU: `shrink` to the rank, `expand` to the outputs, each row with its own adapter.

A program multiplies a tile of rows with the same adapter on tensor cores, so that any mixture of adapters and ranks in
a step is one launch, also in a CUDA graph that knows neither. Of a layer of experts a tile has the rows of one expert,
and a program takes their adapters in turn. The inputs of a shrink are split among programs, which fill a GPU also where
there are few rows; each expand adds up what they have.
"""

import torch
from torch import Tensor

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.lora.adapter_table import ALIGNED, OFFSETS, AdapterTable, AdapterTiles, Between
from blockyard.kernels.lora.adapter_tiles import LARGE_TILE, TILE, tile_rows
from blockyard.kernels.lora.expand import expand_kernel
from blockyard.kernels.lora.few_rows import add_to_few_rows
from blockyard.kernels.lora.shrink import shrink_kernel
from blockyard.kernels.moe.map_experts import map_experts
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl
from blockyard.kernels.tensor_checks import check_tensor

_RANKS = 16  # the fewest of a product on tensor cores
_INPUTS = 128  # of a step of 16-bit numbers, and half of 32-bit ones
_PROGRAMS = 4096  # at most, as far as tiles can share one
_ENOUGH = 264  # programs of a shrink of many rows: two for each multiprocessor
_WIDE = 8  # elements of a wide load


def add_adapters(
    x: Tensor,
    places: Tensor,
    table: AdapterTable,
    out: Tensor,
    between: Between | None = None,
    experts: Tensor | None = None,
    weights: Tensor | None = None,
    tiles: AdapterTiles | None = None,
    norm: RMSNorm | None = None,
    gated: bool = False,
) -> None:
    """Adds the products of adapters to out [rows, outputs], in place.

    x [rows, in], places [rows] int32, below 0: a row has no adapter. Rows may be strided. Places, ranks and experts
    must fit the table: not checked on the device. Raises ValueError for other shapes. between: adds what several GPUs
    have between the two products, [rows, parts, max_rank] float32; None: this one has all.

    Of a layer of experts, experts [rows, top_k] int32 are those of each row, a number behind them all for none, out
    [pairs, outputs] has a row for each of them, x is [rows, in] or [pairs, in], and weights [rows, top_k] float32
    multiply what is added; None: nothing does.

    norm: the products are of norm(x). gated: x is [rows, 2 * in], and they are of silu(gate) * up, the gate first. Both
    only without experts, and a norm without `between`.

    tiles: the rows by place, from `tile_rows`, or the pairs by expert, from `map_experts`; None: they are made here.
    Those by place are read before the kernel launched last has ended, which must not be the one that writes them.
    """
    table.check(x, places, out, experts)
    if (norm is not None or gated) and (experts is not None or (norm is not None and between is not None)):
        raise ValueError("rows of experts are neither normalised nor gated, nor are those of several GPUs normalised")
    (pairs, inputs), parts = (len(out), x.shape[1] // (2 if gated else 1)), table.num_parts
    if not pairs or not parts:
        return
    if weights is not None:
        check_tensor("weights", weights, () if experts is None else tuple(experts.shape), torch.float32)
    is_early = tiles is not None and experts is None
    is_few = tiles is not None and is_early and tiles.tile == 1 and between is None and table.own_ranks is None
    if is_few and not table.batch_invariant:  # others sum in the order of larger tiles
        add_to_few_rows(x, places, table, out, norm, gated=gated, pdl=supports_pdl(x.device))
        return
    if tiles is None:
        tiles = _make_tiles(places, table, experts)
    num_tiles, tile, pdl = len(tiles.owners), tiles.tile, supports_pdl(x.device)
    padded, rows = ceil_div(table.max_rank, _RANKS) * _RANKS, max(next_power_of_2(tile), TILE)
    numbers = _RANKS if rows == TILE else min(next_power_of_2(parts * padded), 64)
    in_tile = _INPUTS if max(x.element_size(), table.arena.element_size()) == 2 else _INPUTS // 2
    most_splits, wanted = _splits(inputs, tile, pairs, batch_invariant=table.batch_invariant)
    steps = ceil_div(inputs, in_tile * (wanted if between is None else 1))
    splits, num_numbers = ceil_div(inputs, steps * in_tile), ceil_div(parts * padded, numbers)
    make = torch.empty if between is None else torch.zeros  # of numbers that other GPUs have, it adds zeros
    h = make((splits, pairs, parts, table.max_rank), dtype=torch.float32, device=x.device)
    squares = h if norm is None else torch.empty((splits, pairs), dtype=torch.float32, device=x.device)
    own = table.ranks if table.own_ranks is None else table.own_ranks
    facts = {
        "OFFSETS": OFFSETS, "ALIGNED": ALIGNED, "TILE": tile, "ROWS": rows, "EXPERTS": experts is not None,
        "NORM": norm is not None, "EARLY": is_early, "PDL": pdl, **pdl_options(pdl),
    }  # fmt: skip
    shrink_kernel[_groups(num_tiles, num_numbers * splits), num_numbers, splits](
        x, x if norm is None else norm.weight, tiles.rows, tiles.owners, places, table.arena, table.offsets,
        table.ranks, own, h, squares, pairs, num_tiles, steps, x.stride(0), inputs, parts, table.max_rank, padded,
        pairs // len(x), pairs // len(places), table.place_stride,
        NUMBERS=numbers, INPUTS=in_tile, OWN=table.own_ranks is not None, GATED=gated,
        num_stages=2 if rows > LARGE_TILE else 3, num_warps=8 if rows > LARGE_TILE else 4, **facts,
    )  # fmt: skip
    if between is not None:
        h = between(h[0])
    outputs = 64 if tile == 1 or rows > LARGE_TILE else 128
    of_part = ceil_div(table.largest, outputs)
    expand_kernel[_groups(num_tiles, parts * of_part), parts * of_part](
        h, squares, tiles.rows, tiles.owners, places, h if weights is None else weights, table.arena, table.offsets,
        table.ranks, table.starts, table.sizes, out, pairs, num_tiles, splits, out.stride(0), parts, table.max_rank,
        of_part, pairs // len(places), table.place_stride, inputs, 0.0 if norm is None else norm.eps,
        OUTPUTS=outputs, RANKS=min(padded, 32), SPLITS=1 if between is not None else most_splits, WIDE=_WIDE,
        WIDE_OUTPUTS=table.is_wide, WEIGHTS=weights is not None, num_stages=1,
        num_warps=8 if rows >= LARGE_TILE else 4, **facts,
    )  # fmt: skip


def _make_tiles(places: Tensor, table: AdapterTable, experts: Tensor | None) -> AdapterTiles:
    if experts is None:
        return tile_rows(places, len(table.ranks), batch_invariant=table.batch_invariant)
    mapped = map_experts(experts, table.num_experts, TILE)
    return AdapterTiles(mapped.pairs, mapped.experts, TILE)


def _splits(inputs: int, tile: int, pairs: int, *, batch_invariant: bool) -> tuple[int, int]:
    """Programs among which the inputs are split, at most and in fact; if batch-invariant, whatever the rows are."""
    if tile == 1 and not batch_invariant:
        return 32, min(ceil_div(inputs, 128), 32)
    most = 16 if tile <= TILE or batch_invariant else 8
    splits = min(ceil_div(inputs, 512), most)
    return most, splits if tile <= TILE or batch_invariant else min(splits, max(_ENOUGH * tile // pairs, 1))


def _groups(num_tiles: int, others: int) -> int:
    """Programs that share the tiles."""
    return max(min(num_tiles, _PROGRAMS // others), 1)
