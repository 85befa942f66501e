"""Packs scattered KV blocks, all layers of each, into one buffer, and unpacks them: copies to host memory are then
large.

A block of an 8B model is 2 MB in 32 pieces of 64 KB. Packed it is one copy, and adjacent blocks are one copy together.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import ceil_div

_TILE = 4096


def gather_blocks_reference(memory: Tensor, block_ids: Tensor, packed: Tensor) -> None:
    packed.copy_(memory[:, block_ids.long()].transpose(0, 1))


def scatter_blocks_reference(memory: Tensor, block_ids: Tensor, packed: Tensor) -> None:
    memory[:, block_ids.long()] = packed.transpose(0, 1)


@triton.jit
def _move_blocks_kernel(
    memory_ptr, block_ids_ptr, packed_ptr, num_blocks, layers, words, GATHER: tl.constexpr, TILE: tl.constexpr
):
    # program (i, j): tile j of layer i % layers of the (i // layers)-th block
    place = tl.program_id(0).to(tl.int64)  # int64: offsets pass 2**31 in pools of more than 8 GB
    layer = place % layers
    block = tl.load(block_ids_ptr + place // layers).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < words
    there = memory_ptr + (layer * num_blocks + block) * words + columns
    here = packed_ptr + place * words + columns
    if GATHER:
        tl.store(here, tl.load(there, mask=inside), mask=inside)
    else:
        tl.store(there, tl.load(here, mask=inside), mask=inside)


def gather_blocks(memory: Tensor, block_ids: Tensor, packed: Tensor) -> None:
    """memory [layers, num_blocks, words], block_ids [n] int32 -> packed [n, layers, words], all of one dtype.

    Ids must lie in [0, num_blocks): not checked on device. Raises ValueError for other shapes.
    """
    _move(memory, block_ids, packed, gather=True)


def scatter_blocks(memory: Tensor, block_ids: Tensor, packed: Tensor) -> None:
    """The reverse of `gather_blocks`: packed -> memory. Ids must differ."""
    _move(memory, block_ids, packed, gather=False)


def _move(memory: Tensor, block_ids: Tensor, packed: Tensor, gather: bool) -> None:
    layers, num_blocks, words = memory.shape
    num = block_ids.numel()
    if packed.shape != (num, layers, words) or packed.dtype != memory.dtype:
        raise ValueError(
            f"packed {list(packed.shape)} {packed.dtype} does not fit {num} blocks of {list(memory.shape)}"
        )
    if not memory.is_contiguous() or not packed.is_contiguous() or block_ids.dtype != torch.int32:
        raise ValueError("memory and packed must be contiguous, and ids int32")
    if num == 0:
        return
    grid = (num * layers, ceil_div(words, _TILE))
    _move_blocks_kernel[grid](memory, block_ids, packed, num_blocks, layers, words, GATHER=gather, TILE=_TILE)
