"""Copies the logits of rows that the host samples, inside the CUDA graph that samples the others."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.tensor_checks import check_tensor

_TILE = 1024


@triton.jit
def _copy_kernel(logits_ptr, slots_ptr, row_ptr, out_ptr, stride, vocab, width, TILE: tl.constexpr):
    # program (i, j): tile j of row i
    place = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + place)
    row = tl.load(row_ptr + slot, mask=slot >= 0, other=-1).to(tl.int64)
    if row < 0:
        return
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(logits_ptr + place * stride + cols, mask=cols < vocab, other=float("-inf"))
    tl.store(out_ptr + row * width + cols, x.to(tl.float32), mask=cols < width)


def copy_logits(logits: Tensor, slots: Tensor, row: Tensor, out: Tensor) -> None:
    """out[row[slots[i]]] = logits[i], for the slots that have a row; columns of out behind those of logits get -inf.

    logits [rows, vocab], rows may be strided; slots [rows] int64, below 0 for padding rows; row [num_slots] int32,
    below 0: none; out [any, vocab or more] float32. Rows must lie in `out`: not checked on device. Raises
    ValueError for other shapes and dtypes.
    """
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"the elements of a row must be contiguous, got strides {logits.stride()}")
    check_tensor("slots", slots, (rows,), torch.int64)
    check_tensor("row", row, (row.numel(),), torch.int32)
    width = max(out.shape[1], vocab)
    check_tensor("out", out, (out.shape[0], width), torch.float32)
    if rows and len(out):
        grid = (rows, ceil_div(width, _TILE))
        _copy_kernel[grid](logits, slots, row, out, logits.stride(0), vocab, width, TILE=_TILE)
