"""Scattered writes of 32-bit words: how a plan's changes reach the slot state on the device."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div

_TILE = 1024


@triton.jit(do_not_specialize=["count", "stride"])
def _scatter_words_kernel(arena_ptr, pairs_ptr, stride, count, TILE: tl.constexpr):
    # program i: tile i of the pairs
    pair = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = pair < count
    index = tl.load(pairs_ptr + pair, mask=inside, other=0)
    value = tl.load(pairs_ptr + stride + pair, mask=inside, other=0)
    tl.store(arena_ptr + index, value, mask=inside)


def scatter_words(arena: Tensor, pairs: Tensor, count: int) -> None:
    """arena[pairs[0, i]] = pairs[1, i] for the first `count` pairs; no index may occur twice.

    arena [words] int32; pairs [2, capacity] int32, on the device or in pinned memory, which the kernel reads without a
    copy. Indices must lie in the arena: not checked. Raises ValueError for other shapes and dtypes.
    """
    if arena.ndim != 1 or arena.dtype != torch.int32 or not arena.is_contiguous():
        raise ValueError(f"arena: expected contiguous int32 words, got {list(arena.shape)} of {arena.dtype}")
    if pairs.ndim != 2 or pairs.shape[0] != 2 or pairs.dtype != torch.int32 or pairs.stride(1) != 1:
        raise ValueError(f"pairs: expected [2, capacity] int32, got {list(pairs.shape)} of {pairs.dtype}")
    if not 0 <= count <= pairs.shape[1]:
        raise ValueError(f"{count} pairs of {pairs.shape[1]}")
    if count:
        grid = (ceil_div(count, _TILE),)
        _scatter_words_kernel[grid](arena, pairs, pairs.stride(0), count, TILE=_TILE)
