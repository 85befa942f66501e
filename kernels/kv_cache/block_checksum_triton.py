"""Checksums of scattered KV blocks on a GPU, as `block_checksum` defines them."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import next_power_of_2
from blockyard.kernels.kv_cache.block_checksum import MIX_1, MIX_2, SHIFT
from blockyard.kernels.kv_cache.copy_blocks import piece_strides

_TILE = 1024
_SHIFT, _MIX_1, _MIX_2 = tl.constexpr(SHIFT), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


@triton.jit(do_not_specialize=["num_blocks", "first_layer"])  # one kernel for all transfers
def _block_checksums_kernel(
    memory_ptr, block_ids_ptr, multipliers_ptr, salts_ptr, sums_ptr, num_blocks, first_layer, words,
    STRIDE: tl.constexpr, GAP: tl.constexpr, PLANE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # program (i, j): layer first_layer + j of the i-th block
    i = tl.program_id(0)
    layer = (first_layer + tl.program_id(1)).to(tl.int64)  # int64: offsets pass 2**31 in pools of more than 16 GB
    block = tl.load(block_ids_ptr + i).to(tl.int64)
    piece_ptr = memory_ptr + (layer * num_blocks + block) * STRIDE
    total = tl.zeros([TILE], dtype=tl.uint64)
    for start in range(0, words, TILE):
        columns = start + tl.arange(0, TILE)
        inside = columns < words
        word = tl.load(piece_ptr + columns + columns // PLANE * GAP, mask=inside, other=0).to(tl.uint64, bitcast=True)
        multiplier = tl.load(multipliers_ptr + columns, mask=inside, other=0).to(tl.uint64, bitcast=True)
        total += (word ^ (word >> _SHIFT)) * multiplier
    x = tl.sum(total, 0) + tl.load(salts_ptr + layer).to(tl.uint64, bitcast=True)
    x = (x ^ (x >> 30)) * tl.full((), _MIX_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _MIX_2, tl.uint64)
    x = x ^ (x >> 31)
    tl.store(sums_ptr + tl.program_id(1) * tl.num_programs(0) + i, x.to(tl.int64, bitcast=True))


def block_checksums(
    memory: Tensor, block_ids: Tensor, layers: range, multipliers: Tensor, salts: Tensor, sums: Tensor
) -> None:
    """Writes each layer's part of the checksums to sums [len(layers), n] int64, which may be in pinned host memory.

    memory: see `copy_blocks.Memory`, block_ids [n] int32, multipliers [words] and salts [all layers] int64
    of `block_checksum`, on the same device. Ids must lie in [0, num_blocks): not checked on device. Raises ValueError
    for other shapes and dtypes.
    """
    (num_layers, num_blocks), words = memory.shape[:2], math.prod(memory.shape[2:])
    stride, gap = piece_strides(memory)
    if memory.dtype != torch.int64 or any(
        t.dtype != torch.int64 or not t.is_contiguous() for t in (multipliers, salts, sums)
    ):
        raise ValueError("memory, multipliers, salts and sums must be int64, and all but the first contiguous")
    if block_ids.dtype != torch.int32 or sums.shape != (len(layers), len(block_ids)) or multipliers.shape != (words,):
        raise ValueError(
            f"{block_ids.dtype} ids {list(block_ids.shape)}, sums {list(sums.shape)} and multipliers"
            f" {list(multipliers.shape)} do not fit blocks of {words} words"
        )
    if salts.shape != (num_layers,) or not 0 <= layers.start <= layers.stop <= num_layers or layers.step != 1:
        raise ValueError(f"{layers} and salts {list(salts.shape)} do not fit {num_layers} layers")
    if not len(layers) or not block_ids.numel():
        return
    _block_checksums_kernel[(block_ids.numel(), len(layers))](
        memory, block_ids, multipliers, salts, sums, num_blocks, layers.start, words,
        stride, gap, memory.shape[-1], TILE=min(_TILE, next_power_of_2(words)), num_warps=4,
    )  # fmt: skip
