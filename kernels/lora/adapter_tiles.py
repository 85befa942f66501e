"""The rows of a step in tiles of one adapter each, on a GPU, and how programs of a kernel share the work on them.

Tiles are made once a step, for all layers.
"""

import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.lora.adapter_table import AdapterTiles
from blockyard.kernels.moe.map_experts import map_experts

FEW_ROWS = 4  # each is a tile of its own, which needs no map
MANY_ROWS = 256  # more have larger tiles
TILE, LARGE_TILE = 16, 64


def rows_of_tile(rows: int, *, batch_invariant: bool) -> int:
    """How many rows a tile has at most in a step of so many."""
    if batch_invariant:
        return TILE
    return 1 if rows <= FEW_ROWS else TILE if rows <= MANY_ROWS else LARGE_TILE


def tile_rows(places: Tensor, num_places: int, *, batch_invariant: bool = False) -> AdapterTiles:
    """places [rows] int32, below `num_places`; below 0: a row has no adapter.

    The owner of a tile is a place. Tiles of one row are the rows themselves, in their order.
    batch_invariant: products of a row do not depend on how many there are.
    """
    tile = rows_of_tile(len(places), batch_invariant=batch_invariant)
    if tile == 1:
        return AdapterTiles(places, places, 1)
    chosen = places.masked_fill(places < 0, num_places)
    # products read the tiles before they wait for the kernel that runs before them
    mapped = map_experts(chosen[:, None], num_places, tile, overlaps=False)
    return AdapterTiles(mapped.pairs, mapped.experts, tile)


@triton.jit
def load_tile(rows_ptr, owners_ptr, tile, exists, num_rows, TILE: tl.constexpr, ROWS: tl.constexpr):
    """The owner of a tile, below 0 for none, and its rows [ROWS], `num_rows` where it has none."""
    index = tl.arange(0, ROWS)
    owner = tl.load(owners_ptr + tile, mask=exists, other=-1).to(tl.int64)
    rows = tl.load(rows_ptr + tile * TILE + index, mask=index < tl.where(exists, TILE, 0), other=num_rows)
    return owner, rows


@triton.jit
def own_items(owners_ptr, num_tiles, items_of_tile):
    """The items of this program, from the first to behind the last one: all programs share those of tiles with rows."""
    CHUNK: tl.constexpr = 128
    used = tl.zeros([CHUNK], tl.int32)
    for begin in range(0, num_tiles, CHUNK):
        tile = begin + tl.arange(0, CHUNK)
        used += (tl.load(owners_ptr + tile, mask=tile < num_tiles, other=-1) >= 0).to(tl.int32)
    items = tl.sum(used, 0) * items_of_tile
    most = tl.cdiv(items, tl.num_programs(0))
    first = tl.program_id(0) * most
    return first, tl.minimum(first + most, items)


@triton.jit
def multiply(a, b, total):
    """total + a @ b, on tensor cores if both have the same dtype of 16 bits."""
    if a.dtype != b.dtype:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:  # noqa: RET505, only one branch is compiled
        return tl.dot(a, b, total, input_precision="ieee")
