"""The rows of a step in tiles of one adapter each, on a GPU, and what kernels read of a tile.

They are made once a step, for all layers.
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
    if rows <= FEW_ROWS:
        return 1
    return TILE if rows <= MANY_ROWS or batch_invariant else LARGE_TILE


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
def load_tile(rows_ptr, owners_ptr, tile, num_rows, TILE: tl.constexpr, ROWS: tl.constexpr):
    """The owner of a tile, and its rows [ROWS], `num_rows` where it has none."""
    index, owner = tl.arange(0, ROWS), tl.load(owners_ptr + tile).to(tl.int64)
    if TILE == 1:
        rows = tl.where(index == 0, tile, num_rows)
    else:
        rows = tl.load(rows_ptr + tile * TILE + index, mask=index < TILE, other=num_rows)
    return owner, tl.where(owner < 0, num_rows, rows)


@triton.jit
def next_tile(tile, owner, num_tiles, TILE: tl.constexpr):
    """The next tile of a program; behind a tile without rows there is none."""
    following = tile + tl.num_programs(0)
    return following if TILE == 1 else tl.where(owner < 0, num_tiles, following)


@triton.jit
def multiply(a, b, total):
    """total + a @ b, on tensor cores if both have the same dtype of 16 bits."""
    if a.dtype != b.dtype:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    else:  # noqa: RET505, only one branch is compiled
        return tl.dot(a, b, total, input_precision="ieee")
