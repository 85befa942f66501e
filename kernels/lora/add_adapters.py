"""The products of adapters on a GPU: `shrink` to the rank, `expand` to the outputs, each row with its own adapter.

A program multiplies a tile of rows with the same adapter on tensor cores, so that any mixture of adapters and ranks in
a step is one launch, also in a CUDA graph that knows neither. Of a layer of experts a tile has the rows of one expert,
and a program takes their adapters in turn. Few rows are multiplied one by one. The inputs of a shrink are split among
programs, which fill a GPU also where there are few rows; each expand adds up what they have.

The shrink is launched before the layer's own product and the expand behind it: while the shrink runs, the product loads
its first weights. Both are launched behind a product that lets the next kernel begin only when all before it have
ended: then the shrink runs beside the product, and needs no time of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockyard.kernels.int_math import ceil_div, next_power_of_2
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.lora.adapter_table import ALIGNED, OFFSETS, AdapterTable, AdapterTiles, Between
from blockyard.kernels.lora.adapter_tiles import LARGE_TILE, TILE, tile_rows
from blockyard.kernels.lora.expand import MOST_SPLITS, expand_kernel
from blockyard.kernels.lora.expand_few import expand_few_kernel
from blockyard.kernels.lora.one_row import expand_row_kernel, shrink_row_kernel
from blockyard.kernels.lora.shrink import shrink_kernel
from blockyard.kernels.moe.map_experts import map_experts
from blockyard.kernels.programmatic_launch import pdl_options, supports_pdl
from blockyard.kernels.tensor_checks import check_tensor

_RANKS = 16  # the fewest of a product on tensor cores
_MOST_RANKS, _MANY_RANKS = 32, 128  # of a piece of B, and of adapters that have more
_MANY_INPUTS = 8192  # more are split among more programs
_PROGRAMS = 528  # that share the work on tiles: four for each of 132 multiprocessors
_REGISTERS, _MANY_REGISTERS = 128, 168  # of a thread, so that four programs fit, and three where ranks may be large
_SHRINK_PROGRAMS, _SHRINK_REGISTERS = 396, 168  # of a shrink: three for each
_BEHIND_PROGRAMS = 1056  # of one beside a product, which leaves room for some of them at a time
_ENOUGH = 264  # programs of a shrink of many rows: two for each multiprocessor
_NUMBERS = 4  # of a program of one row
_MANY_OUTPUTS = 8192  # of a layer, of which programs have several tiles in a row
_FEW_PROGRAMS = 1056  # of an expand to fewer outputs
_FEW_REGISTERS = 128  # of a thread there: the compiler would use fewer, and wait more
_FEW_MATRIX, _FEW_RANKS, _FEW_WARPS = 4096, 64, 4  # numbers of B that such a program has at a time, of so many ranks
_WIDE = 8  # elements of a wide load


@dataclass(frozen=True, slots=True)
class _AdapterLaunch:
    """What both launches have in common."""

    table: AdapterTable
    places: Tensor
    tiles: AdapterTiles
    pairs: int
    inputs: int
    norm: RMSNorm | None
    is_of_experts: bool
    is_whole: bool  # the inputs are not split, because several GPUs add what they have of h
    is_early: bool  # what says which adapter a row has is read before the kernel before has ended
    is_behind: bool  # so is x
    pdl: bool

    @property
    def is_by_row(self) -> bool:
        return self.tiles.tile == 1 and not self.is_of_experts

    @property
    def is_small(self) -> bool:
        """Whether tiles have at most `TILE` rows, of one adapter."""
        return self.tiles.tile == TILE and not self.is_of_experts

    @property
    def rows(self) -> int:
        """Of a tile, as tensor cores take them."""
        return max(next_power_of_2(self.tiles.tile), TILE)

    @property
    def is_large(self) -> bool:
        return self.rows >= LARGE_TILE

    @property
    def most_splits(self) -> int:
        """Programs among which the inputs are split, at most; whatever the rows are, but for large tiles."""
        if self.is_whole:
            return 1
        return 8 if self.is_large else 16 if self.inputs <= _MANY_INPUTS else MOST_SPLITS.value

    @property
    def padded_rank(self) -> int:
        return ceil_div(self.table.max_rank, _RANKS) * _RANKS

    @property
    def registers(self) -> int:
        return _REGISTERS if self.padded_rank <= _MOST_RANKS or self.is_large else _MANY_REGISTERS

    @property
    def outputs_aligned(self) -> int:
        return ALIGNED if self.table.is_wide else 1

    @property
    def rows_of_place(self) -> int:
        return self.pairs // len(self.places)

    def options(self) -> dict[str, bool | int]:
        own = {"OFFSETS": OFFSETS, "ALIGNED": ALIGNED, "NORM": self.norm is not None}
        return own | {"EARLY": self.is_early, "PDL": self.pdl, **pdl_options(self.pdl)}

    def tile_options(self) -> dict[str, bool | int]:
        own = {"TILE": self.tiles.tile, "ROWS": self.rows, "EXPERTS": self.is_of_experts}
        return self.options() | own


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
    """Adds the products of adapters to out [rows, outputs], in place: see `start_adapters`."""
    start_adapters(x, places, table, between, experts, weights, tiles, norm, gated)(out)


def start_adapters(
    x: Tensor,
    places: Tensor,
    table: AdapterTable,
    between: Between | None = None,
    experts: Tensor | None = None,
    weights: Tensor | None = None,
    tiles: AdapterTiles | None = None,
    norm: RMSNorm | None = None,
    gated: bool = False,
    is_ordered: bool = False,
) -> Callable[[Tensor], None]:
    """Launches the first product of adapters. Returns what adds the second one to out [rows, outputs], in place, whose
    rows may be strided; it raises ValueError for another number of rows.

    x [rows, in], places [rows] int32, below 0: a row has no adapter. Rows may be strided. Places, ranks and experts
    must fit the table: not checked on the device. Raises ValueError for other shapes. between: adds what several GPUs
    have between the two products, [rows, parts, ranks] float32; None: this one has all.

    Of a layer of experts, experts [rows, top_k] int32 are those of each row, a number behind them all for none, out
    [pairs, outputs] has a row for each of them, x is [rows, in] or [pairs, in], and weights [rows, top_k] float32
    multiply what is added; None: nothing does.

    norm: the products are of norm(x). gated: x is [rows, 2 * in], and they are of silu(gate) * up, the gate first. Both
    only without experts, and a norm without `between`.

    tiles: the rows by place, from `tile_rows`, or the pairs by expert, from `map_experts`; None: they are made here.
    Those by place are read before the kernel launched last has ended, unless their `is_early` is False.

    is_ordered: the product of x that is launched next is an `OrderedProduct`, and `out` is its result. Then what is
    returned may launch both.
    """
    table.check(x, places, experts)
    if (norm is not None or gated) and (experts is not None or (norm is not None and between is not None)):
        raise ValueError("rows of experts are neither normalised nor gated, nor are those of several GPUs normalised")
    pairs, inputs = len(places) if experts is None else experts.numel(), x.shape[1] // (2 if gated else 1)
    if weights is not None:
        check_tensor("weights", weights, () if experts is None else tuple(experts.shape), torch.float32)
    if not pairs or not table.num_parts:
        return _add_nothing
    is_early = tiles is not None and experts is None and tiles.is_early
    if tiles is None:
        tiles = _make_tiles(places, table, experts)
    is_whole, is_behind = between is not None, is_ordered and is_early and between is None and tiles.tile == TILE
    launch = _AdapterLaunch(
        table, places, tiles, pairs, inputs, norm, experts is not None, is_whole, is_early, is_behind,
        supports_pdl(x.device),
    )  # fmt: skip
    if is_behind:
        return lambda out: _expand(launch, *_shrink_tiles(launch, x, gated), out)
    h, squares = (_shrink_rows if launch.is_by_row else _shrink_tiles)(launch, x, gated)
    h = h if between is None else between(h[0])[None]
    return lambda out: _expand(launch, h, squares, out, weights)


def _expand(launch: _AdapterLaunch, h: Tensor, squares: Tensor, out: Tensor, weights: Tensor | None = None) -> None:
    if out.dim() != 2 or len(out) != launch.pairs or out.stride(1) != 1:
        raise ValueError(f"expected out [{launch.pairs}, outputs], got {list(out.shape)} in steps of {out.stride()}")
    if launch.is_by_row:
        _expand_rows(launch, h, squares, out)
    elif launch.is_small and out.shape[1] <= _MANY_OUTPUTS:
        _expand_few(launch, h, squares, out)
    else:
        _expand_tiles(launch, h, squares, out, weights)


def _add_nothing(out: Tensor) -> None:
    """There are no rows."""


def _make_tiles(places: Tensor, table: AdapterTable, experts: Tensor | None) -> AdapterTiles:
    if experts is None:
        return tile_rows(places, len(table.ranks), batch_invariant=table.batch_invariant)
    mapped = map_experts(experts, table.num_experts, TILE)
    return AdapterTiles(mapped.pairs, mapped.experts, TILE)


def _make_products(launch: _AdapterLaunch, x: Tensor, splits: int) -> tuple[Tensor, Tensor]:
    """What the first product stores: h, and the sums of squares of rows that are normalised."""
    make = torch.zeros if launch.is_whole else torch.empty  # of numbers that other GPUs have, it adds zeros
    shape = (splits, launch.pairs, launch.table.num_parts, launch.padded_rank)
    h = make(shape, dtype=torch.float32, device=x.device)
    squares = h if launch.norm is None else torch.empty((splits, launch.pairs), dtype=torch.float32, device=x.device)
    return h, squares


def _shrink_rows(launch: _AdapterLaunch, x: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    table, inputs, padded = launch.table, launch.inputs, launch.padded_rank
    in_tile = 256 if inputs <= _MANY_INPUTS else 512
    steps = ceil_div(inputs, in_tile * launch.most_splits)
    splits, own = ceil_div(inputs, steps * in_tile), table.ranks if table.own_ranks is None else table.own_ranks
    h, squares = _make_products(launch, x, splits)
    shrink_row_kernel[launch.pairs, table.num_parts * padded // _NUMBERS, splits](
        x, x if launch.norm is None else launch.norm.weight, launch.places, table.arena, table.offsets, table.ranks,
        own, h, squares, launch.pairs, steps, x.stride(0), inputs, table.num_parts, padded, table.place_stride,
        NUMBERS=_NUMBERS, INPUTS=in_tile, OWN=table.own_ranks is not None, GATED=gated, num_warps=1, **launch.options(),
    )  # fmt: skip
    return h, squares


def _expand_rows(launch: _AdapterLaunch, h: Tensor, squares: Tensor, out: Tensor) -> None:
    table, outputs, ranks = launch.table, 64, min(next_power_of_2(launch.padded_rank), 2 * _MOST_RANKS)
    of_part = ceil_div(table.largest, outputs)
    expand_row_kernel[launch.pairs, table.num_parts * of_part](
        h, squares, launch.places, table.arena, table.offsets, table.ranks, table.starts, table.sizes, out,
        launch.pairs, len(h), out.stride(0), table.num_parts, launch.padded_rank, of_part, table.place_stride,
        launch.inputs, 0.0 if launch.norm is None else launch.norm.eps,
        OUTPUTS=outputs, RANKS=ranks, SPLITS=launch.most_splits, WIDE=_WIDE, OUTPUTS_ALIGNED=launch.outputs_aligned,
        num_warps=ranks // _RANKS, **launch.options(),
    )  # fmt: skip


def _expand_few(launch: _AdapterLaunch, h: Tensor, squares: Tensor, out: Tensor) -> None:
    table, tiles, ranks = launch.table, launch.tiles, min(next_power_of_2(launch.padded_rank), _FEW_RANKS)
    factor = 1 if launch.padded_rank <= _MOST_RANKS else 2
    outputs = _FEW_MATRIX * factor // ranks
    of_tile = ceil_div(out.shape[1], outputs) + table.num_parts - 1  # at most, as each part begins with a tile
    expand_few_kernel[(min(len(tiles.owners) * of_tile, _FEW_PROGRAMS),)](
        h, squares, tiles.rows, tiles.owners, table.arena, table.offsets, table.ranks, table.starts, table.sizes, out,
        launch.pairs, len(tiles.owners), of_tile, out.stride(0), table.num_parts, launch.padded_rank,
        table.place_stride, launch.inputs, 0.0 if launch.norm is None else launch.norm.eps,
        TILE=TILE, PARTS=next_power_of_2(table.num_parts), OUTPUTS=outputs, RANKS=ranks,
        MANY_RANKS=launch.padded_rank > ranks, SPLITS=len(h), WIDE=_WIDE,
        OUTPUTS_ALIGNED=launch.outputs_aligned, num_warps=_FEW_WARPS * factor, num_stages=1,
        maxnreg=_FEW_REGISTERS, **launch.options(),
    )  # fmt: skip


def _shrink_tiles(launch: _AdapterLaunch, x: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    table, inputs, padded, tiles = launch.table, launch.inputs, launch.padded_rank, launch.tiles
    is_large = launch.is_large
    numbers = min(next_power_of_2(padded * (table.num_parts if is_large else 1)), 64)
    in_tile = 128 if is_large or numbers > _MOST_RANKS else 256
    in_tile //= 2 if max(x.element_size(), table.arena.element_size()) > 2 else 1
    in_tile //= 2 if launch.rows > LARGE_TILE else 1
    wanted = _many_rows_splits(launch) if is_large else launch.most_splits
    steps = ceil_div(inputs, in_tile * wanted)
    splits, num_numbers = ceil_div(inputs, steps * in_tile), ceil_div(table.num_parts * padded, numbers)
    own = table.ranks if table.own_ranks is None else table.own_ranks
    h, squares = _make_products(launch, x, splits)
    programs = _BEHIND_PROGRAMS if launch.is_behind else _SHRINK_PROGRAMS
    shrink_kernel[(min(len(tiles.owners) * num_numbers * splits, programs),)](
        x, x if launch.norm is None else launch.norm.weight, tiles.rows, tiles.owners, launch.places, table.arena,
        table.offsets, table.ranks, own, h, squares, launch.pairs, len(tiles.owners), steps, splits, num_numbers,
        x.stride(0), inputs, table.num_parts, padded, launch.pairs // len(x), launch.rows_of_place,
        table.place_stride,
        NUMBERS=numbers, INPUTS=in_tile, OWN=table.own_ranks is not None, GATED=gated, num_stages=2,
        BEHIND=launch.is_behind, maxnreg=_REGISTERS if is_large else _SHRINK_REGISTERS,
        num_warps=8 if is_large else 4, **launch.tile_options(),
    )  # fmt: skip
    return h, squares


def _many_rows_splits(launch: _AdapterLaunch) -> int:
    """Programs among which the inputs of large tiles are split: as many as fill a GPU."""
    return max(min(ceil_div(launch.inputs, 512), launch.most_splits, _ENOUGH * launch.tiles.tile // launch.pairs), 1)


def _expand_tiles(launch: _AdapterLaunch, h: Tensor, squares: Tensor, out: Tensor, weights: Tensor | None) -> None:
    table, tiles, outputs = launch.table, launch.tiles, 128 if launch.rows <= LARGE_TILE else 64
    of_part = ceil_div(table.largest, outputs)
    is_large = launch.is_large
    padded = next_power_of_2(launch.padded_rank)
    expand_kernel[(min(len(tiles.owners) * table.num_parts * of_part, _PROGRAMS),)](
        h, squares, tiles.rows, tiles.owners, launch.places, h if weights is None else weights, table.arena,
        table.offsets, table.ranks, table.starts, table.sizes, out, launch.pairs, len(tiles.owners), len(h),
        out.stride(0), table.num_parts, launch.padded_rank, of_part, launch.rows_of_place, table.place_stride,
        launch.inputs, 0.0 if launch.norm is None else launch.norm.eps,
        OUTPUTS=outputs, RANKS=min(padded, _MOST_RANKS), MANY=min(padded, _MANY_RANKS) if padded > _MOST_RANKS else 0,
        SPLITS=launch.most_splits if is_large else len(h), ALL_SPLITS=not is_large, WIDE=_WIDE,
        OUTPUTS_ALIGNED=launch.outputs_aligned, WEIGHTS=weights is not None,
        STAGES=3 if is_large else 4, num_stages=1,
        maxnreg=launch.registers, num_warps=8 if is_large else 4, **launch.tile_options(),
    )  # fmt: skip
