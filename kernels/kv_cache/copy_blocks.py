"""Copies scattered KV blocks to another pool, a packed buffer, or pinned host memory, with checksums in the same pass.

The target may be memory of another process: a kernel writes to any address that the GPU has mapped. Few programs, each
with many pieces, leave multiprocessors for the steps that run at the same time.
"""

import math
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockyard.kernels.int_math import next_power_of_2
from blockyard.kernels.kv_cache.block_checksum import MIX_1, MIX_2, SHIFT, block_checksums_reference

_TILE = 2048  # words: one program has 16 KiB in flight
_SHIFT, _MIX_1, _MIX_2 = tl.constexpr(SHIFT), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


class Memory(Protocol):
    """A tensor of blocks, int64, as far as the kernel needs it: [layers, num_blocks, words], contiguous; or some heads
    of each block, [layers, num_blocks, planes, words] with strides (num_blocks * n, n, any, 1)."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def stride(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def data_ptr(self) -> int: ...


def piece_strides(memory: Memory) -> tuple[int, int]:
    """Returns the words from one block to the next one, and those between the end of a plane and the next one.

    Raises ValueError for other strides than `Memory` has.
    """
    strides, (_, num_blocks, *planes, words) = memory.stride(), memory.shape
    gap = strides[2] - words if planes else 0
    if strides[-1] != 1 or strides[0] != num_blocks * strides[1] or gap < 0 or (not planes and strides[1] != words):
        raise ValueError(f"blocks {list(memory.shape)} must be contiguous, or some heads of them, not {strides}")
    return strides[1], gap


def copy_blocks_reference(
    source: Tensor,
    target: Tensor,
    ids: Tensor,
    num_layers: int,
    first_source_layer: int = 0,
    first_target_layer: int = 0,
) -> Tensor:
    """Copies as `copy_blocks`. Returns the checksums, [num_layers, n] int64."""
    source_ids, target_ids = ids.long()
    first, last = first_source_layer, first_source_layer + num_layers
    target[first_target_layer : first_target_layer + num_layers, target_ids] = source[first:last, source_ids]
    flat = source.flatten(2)
    sums = [block_checksums_reference(flat, source_ids, range(i, i + 1)) for i in range(first, last)]
    return torch.stack(sums) if sums else ids.new_empty((0, len(source_ids)), dtype=torch.int64)


@triton.jit(
    do_not_specialize=[
        "num", "num_layers", "source_blocks", "target_blocks", "first_source_layer", "first_target_layer"
    ]
)  # fmt: skip
def _copy_blocks_kernel(
    source_ptr, target_ptr, ids_ptr, multipliers_ptr, salts_ptr, sums_ptr, num, num_layers, source_blocks,
    target_blocks, first_source_layer, first_target_layer,
    SOURCE_STRIDE: tl.constexpr, TARGET_STRIDE: tl.constexpr, SOURCE_GAP: tl.constexpr, TARGET_GAP: tl.constexpr,
    PLANE: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr, CHECKSUMS: tl.constexpr,
):  # fmt: skip
    # program p: pieces p, p + programs, ...; a piece is one block in one layer
    for piece in range(tl.program_id(0), num * num_layers, tl.num_programs(0)):
        i, layer = piece % num, (piece // num).to(tl.int64)  # int64: offsets pass 2**31 in pools of more than 16 GB
        source_block = tl.load(ids_ptr + i).to(tl.int64)
        target_block = tl.load(ids_ptr + num + i).to(tl.int64)
        from_ptr = source_ptr + ((first_source_layer + layer) * source_blocks + source_block) * SOURCE_STRIDE
        to_ptr = target_ptr + ((first_target_layer + layer) * target_blocks + target_block) * TARGET_STRIDE
        total = tl.zeros([TILE], dtype=tl.uint64)
        for start in range(0, WORDS, TILE):
            columns = start + tl.arange(0, TILE)
            inside = columns < WORDS
            planes = columns // PLANE  # a gap behind each plane has the heads of other ranks
            word = tl.load(from_ptr + columns + planes * SOURCE_GAP, mask=inside, other=0)
            tl.store(to_ptr + columns + planes * TARGET_GAP, word, mask=inside)
            if CHECKSUMS:
                word = word.to(tl.uint64, bitcast=True)
                multiplier = tl.load(multipliers_ptr + columns, mask=inside, other=0).to(tl.uint64, bitcast=True)
                total += (word ^ (word >> _SHIFT)) * multiplier
        if CHECKSUMS:
            x = tl.sum(total, 0) + tl.load(salts_ptr + first_source_layer + layer).to(tl.uint64, bitcast=True)
            x = (x ^ (x >> 30)) * tl.full((), _MIX_1, tl.uint64)
            x = (x ^ (x >> 27)) * tl.full((), _MIX_2, tl.uint64)
            x = x ^ (x >> 31)
            tl.store(sums_ptr + piece, x.to(tl.int64, bitcast=True))


def copy_blocks(
    source: Tensor,
    target: Memory,
    ids: Tensor,
    num_layers: int,
    first_source_layer: int = 0,
    first_target_layer: int = 0,
    checksums: tuple[Tensor, Tensor, Tensor] | None = None,
    programs: int = 32,
) -> None:
    """Copies blocks ids[0] of source to blocks ids[1] of target, in layers [first_source_layer, ...) and [first_target_
    layer, ...).

    source, target: see `Memory`, of different numbers of layers and blocks. ids [2, n] int32 on the
    device; no target block may occur twice, and none is checked on the device. checksums: multipliers [words] and salts
    [layers of source] of `block_checksum`, and sums [num_layers, n], which get each layer's part of the checksums; all
    int64. The sums, and source or target, may be in pinned host memory. programs: upper bound of the multiprocessors in
    use. Raises ValueError for other shapes and dtypes.
    """
    (layers, num_blocks), (target_layers, target_blocks) = source.shape[:2], target.shape[:2]
    words, num = math.prod(source.shape[2:]), ids.shape[-1]
    if source.dtype != torch.int64 or target.dtype != torch.int64:
        raise ValueError(f"source and target must be int64, not {source.dtype} and {target.dtype}")
    (source_stride, source_gap), (target_stride, target_gap) = piece_strides(source), piece_strides(target)
    if ids.shape != (2, num) or ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"ids must be [2, n] int32 and contiguous, got {list(ids.shape)} {ids.dtype}")
    fits = 0 <= first_source_layer <= layers - num_layers and 0 <= first_target_layer <= target_layers - num_layers
    if source.shape[2:] != target.shape[2:] or not fits or num_layers < 0:
        raise ValueError(
            f"{num_layers} layers from {first_source_layer} of {list(source.shape)} do not fit those from"
            f" {first_target_layer} of {list(target.shape)}"
        )
    multipliers, salts, sums = checksums or (ids, ids, ids)
    if checksums is not None:
        if any(t.dtype != torch.int64 or not t.is_contiguous() for t in checksums):
            raise ValueError("multipliers, salts and sums must be int64 and contiguous")
        if multipliers.shape != (words,) or salts.shape != (layers,) or sums.shape != (num_layers, num):
            raise ValueError(f"sums {list(sums.shape)} and multipliers do not fit {num} blocks of {words} words")
    if not num or not num_layers:
        return
    tile = min(_TILE, next_power_of_2(words))
    _copy_blocks_kernel[(min(programs, num * num_layers),)](
        source, target, ids, multipliers, salts, sums, num, num_layers, num_blocks, target_blocks, first_source_layer,
        first_target_layer, source_stride, target_stride, source_gap, target_gap, source.shape[-1], WORDS=words,
        TILE=tile, CHECKSUMS=checksums is not None,
        num_warps=max(1, min(8, tile // 64)),
    )  # fmt: skip
