"""Sums over ranks on GPUs of one host, alone or with the residual and its RMSNorm."""

import torch
from torch import Tensor

from blockyard.kernels.all_reduce.one_step import one_step
from blockyard.kernels.all_reduce.peer_buffers import ALIGNMENT, PeerBuffers
from blockyard.kernels.all_reduce.row_tiles import LONGEST_ROW, RowTiles, flat_tiles, norm_tiles
from blockyard.kernels.all_reduce.two_step import two_step
from blockyard.kernels.int_math import ceil_div

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def sum_ranks(part: Tensor, buffers: PeerBuffers, two_steps: bool = False, tiles: RowTiles | None = None) -> Tensor:
    """Returns the sum of all ranks' parts, contiguous tensors of equal shape in 16-bit floats or float32.

    Every rank calls it with the same options. tiles: to measure others; their `out` is returned. Raises ValueError for
    other tensors, and for a part that is too large.
    """
    out = torch.empty_like(part) if tiles is None else tiles.out
    if part.numel():
        tiles = tiles or flat_tiles(part, out)
        _check(part, buffers, two_steps, tiles)
        (two_step if two_steps else one_step)(part, buffers, tiles)
    return out


def sum_add_rms_norm(
    part: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    buffers: PeerBuffers,
    total: Tensor | None = None,
    two_steps: bool = False,
    tiles: RowTiles | None = None,
) -> Tensor:
    """Adds the sum of all ranks' parts [rows, size] to residual [rows, size] in place. Returns its RMSNorm.

    weight: [size]. total: [rows, size] that gets the sum, and residual stays. Rows of residual and total may be
    strided. Otherwise as `sum_ranks`, with the bits of `add_rms_norm` behind it.
    """
    total = residual if total is None else total
    if part.shape != residual.shape or part.dim() != 2 or weight.shape != part.shape[1:]:
        raise ValueError(f"part {list(part.shape)} and weight {list(weight.shape)} do not fit {list(residual.shape)}")
    if total.shape != residual.shape or not part.dtype == residual.dtype == total.dtype:
        raise ValueError(f"total {list(total.shape)}: dtypes {part.dtype}, {residual.dtype}, {total.dtype}")
    if residual.stride(1) != 1 or total.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("the elements of a row must be contiguous")
    if part.shape[1] > LONGEST_ROW:
        raise ValueError(f"rows of {part.shape[1]} are longer than {LONGEST_ROW}")
    out = torch.empty_like(part) if tiles is None else tiles.out
    if part.numel():
        tiles = tiles or norm_tiles(residual, total, weight, out, eps)
        _check(part, buffers, two_steps, tiles)
        (two_step if two_steps else one_step)(part, buffers, tiles)
    return out


def fits(num_rows: int, row_bytes: int, buffers: PeerBuffers, two_steps: bool) -> bool:
    """Whether the buffers have room for a part."""
    if two_steps:
        return ceil_div(num_rows, buffers.size) * buffers.size * row_bytes <= buffers.two_step_bytes()
    return num_rows * row_bytes <= buffers.one_step_bytes()


def _check(part: Tensor, buffers: PeerBuffers, two_steps: bool, tiles: RowTiles) -> None:
    if part.dtype not in DTYPES or not part.is_contiguous():
        raise ValueError(f"parts are contiguous floats of 16 or 32 bits, not {part.dtype} by {part.stride()}")
    if not fits(tiles.num_rows, tiles.size * part.itemsize, buffers, two_steps):
        raise ValueError(f"a part of {part.numel() * part.itemsize} bytes is larger than the buffers of ranks")
    assert buffers.half_bytes % ALIGNMENT == 0
