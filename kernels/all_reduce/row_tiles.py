"""How a part is divided into tiles: rows with a norm, and otherwise as many numbers as a program takes at a time."""

from dataclasses import dataclass

from torch import Tensor

from blockyard.kernels.int_math import ceil_div, next_power_of_2

LONGEST_ROW = 32768  # elements; a program holds a whole row
FLAT_TILE = 2048  # elements of a tile without a norm
PROGRAMS = 264  # at most: two for each multiprocessor of an H100
LEAD = 2  # tiles that a program sends before it waits for the first, if it has several


@dataclass(frozen=True, slots=True, eq=False)
class RowTiles:
    """The tiles of one sum, and what is written."""

    num_rows: int
    size: int  # elements of a row
    tile: int  # a power of two
    programs: int
    num_warps: int
    lead: int
    out: Tensor  # the sum, or with a norm what is normalised
    residual: Tensor  # [rows, size]; without a norm these are any tensors
    total: Tensor
    weight: Tensor
    eps: float
    has_norm: bool


def flat_tiles(part: Tensor, out: Tensor) -> RowTiles:
    num_rows, any_rows = ceil_div(part.numel(), FLAT_TILE), out.reshape(1, -1)
    programs, num_warps = min(num_rows, PROGRAMS), FLAT_TILE // 512
    lead = _lead(num_rows, programs)
    sizes = (num_rows, FLAT_TILE, FLAT_TILE, programs, num_warps, lead)
    return RowTiles(*sizes, out, any_rows, any_rows, out, 0.0, has_norm=False)


def norm_tiles(residual: Tensor, total: Tensor, weight: Tensor, out: Tensor, eps: float) -> RowTiles:
    num_rows, size = residual.shape
    tile, programs = next_power_of_2(size), min(num_rows, PROGRAMS)
    sizes = (num_rows, size, tile, programs, min(max(tile // 512, 1), 16), _lead(num_rows, programs))
    return RowTiles(*sizes, out, residual, total, weight, eps, has_norm=True)


def _lead(num_rows: int, programs: int) -> int:
    return 1 if num_rows <= programs else LEAD
