"""Blocks of numbers in GGUF files, and the kept forms that they become.

A row of inputs is blocks side by side, each of 32 numbers (Q4_0 to Q8_0) or 256 (K types) with their scales. Documented
in ggml (ggml-common.h, dequantize_row_* in ggml-quants.c) and in the package gguf (quants.py).

    Q4_0, Q4_1, Q4_K                W4A16, groups of 32
    Q5_0, Q5_1, Q8_0, Q5_K          W8A16, groups of 32
    Q6_K                            W8A16, groups of 16
    all others                      dequantized, by the package

A number is code * scale, or code * scale + offset. Scales of K types are products of 16 and 6 or 8 bits: in a model of
16 bits they are rounded to float16, which is finer than the rounding of a whole weight to that dtype; in float32 they
are exact. So are zeros, -offset / scale.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from blockyard.services.gpu_worker.quantization.kept import w4a16, w8a16
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16

# larger zeros are infinite, or in float16 not far from it: then the offset counts alone
MOST_ZERO = {2: 32_768.0, 4: torch.finfo(torch.float32).max}  # by the bytes of the model's dtype


class BlockNumbers(NamedTuple):
    """The numbers of blocks [outputs, blocks], each with dimensions of groups and of codes in a group."""

    codes: Tensor  # [outputs, blocks, groups, n], without offsets around 0 or `MIDDLE`
    scales: Tensor  # [outputs, blocks, groups] float32
    offsets: Tensor | None = None


class GgmlType(NamedTuple):
    bits: int
    group: int
    has_offsets: bool
    unpack: Callable[[Tensor], BlockNumbers]  # of blocks uint8 [outputs, blocks, bytes]

    def form(self, dtype: torch.dtype) -> KeptForm:
        """dtype: of the model."""
        floats = torch.float16 if dtype.itemsize == 2 else torch.float32
        if self.bits == 4:
            return W4A16(self.group, floats if self.has_offsets else None, floats)
        return W8A16(torch.uint8 if self.has_offsets else torch.int8, self.group, self.has_offsets, floats)

    def kept(self, blocks: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of `form`."""
        codes, scales, offsets = self.unpack(blocks)
        outputs, names = len(blocks), w4a16 if self.bits == 4 else w8a16
        zeros = None
        if offsets is not None:
            zeros = -offsets / scales
            is_plain = ~(zeros.abs() <= MOST_ZERO[dtype.itemsize])  # also where the scale is 0
            codes = torch.where(is_plain[..., None], 0, codes)
            scales, zeros = torch.where(is_plain, -offsets, scales), torch.where(is_plain, 1.0, zeros)
        flat = codes.reshape(outputs, -1)
        made = {names.CODES: w4a16.pack(flat) if self.bits == 4 else flat, names.SCALES: scales.reshape(outputs, -1)}
        return made if zeros is None else made | {names.ZEROS: zeros.reshape(outputs, -1)}


def _float16(blocks: Tensor, start: int) -> Tensor:
    """[outputs, blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(stored: Tensor) -> Tensor:
    """Bytes [..., n] -> codes [..., 2 * n]: the lower halves, then the upper ones."""
    return torch.cat((stored & 15, stored >> 4), -1)


def _bits(stored: Tensor, width: int) -> Tensor:
    """Bytes [..., n] -> [..., 8 / width, n]: the lowest bits of each, then the next ones."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=stored.device)
    return stored[..., None, :] >> shifts[:, None] & (1 << width) - 1


def _fifth_bits(stored: Tensor) -> Tensor:
    """Four bytes -> the fifth bits [..., 32] of codes, in turn."""
    return _bits(stored, 1).mT.flatten(-2) << 4


def _q4_0(blocks: Tensor) -> BlockNumbers:
    return BlockNumbers(_nibbles(blocks[..., 2:])[..., None, :], _float16(blocks, 0))


def _q4_1(blocks: Tensor) -> BlockNumbers:
    return BlockNumbers(_nibbles(blocks[..., 4:])[..., None, :], _float16(blocks, 0), _float16(blocks, 2))


def _q5_0(blocks: Tensor) -> BlockNumbers:
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return BlockNumbers((codes.view(torch.int8) - 16)[..., None, :], _float16(blocks, 0))


def _q5_1(blocks: Tensor) -> BlockNumbers:
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return BlockNumbers(codes[..., None, :], _float16(blocks, 0), _float16(blocks, 2))


def _q8_0(blocks: Tensor) -> BlockNumbers:
    return BlockNumbers(blocks[..., 2:].contiguous().view(torch.int8)[..., None, :], _float16(blocks, 0))


def _scales_and_offsets(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Of the K types with eight groups of 32: [outputs, blocks, 8] each, from 6 bits that 12 bytes have."""
    scale, least, upper = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((scale & 63, upper & 15 | scale >> 2 & 48), -1)
    offsets = torch.cat((least & 63, upper >> 4 | least >> 2 & 48), -1)
    return _float16(blocks, 0) * scales, _float16(blocks, 2) * offsets


def _q4_k(blocks: Tensor) -> BlockNumbers:
    scales, offsets = _scales_and_offsets(blocks)
    return BlockNumbers(_in_groups(blocks[..., 16:]), scales, -offsets)


def _q5_k(blocks: Tensor) -> BlockNumbers:
    scales, offsets = _scales_and_offsets(blocks)
    return BlockNumbers(_in_groups(blocks[..., 48:]) | _bits(blocks[..., 16:48], 1) << 4, scales, -offsets)


def _in_groups(stored: Tensor) -> Tensor:
    """128 bytes -> codes [..., 8, 32]: of 32 bytes the lower halves are a group, and the upper ones the next."""
    return _bits(torch.unflatten(stored, -1, (4, 32)), 4).flatten(-3, -2)


def _q6_k(blocks: Tensor) -> BlockNumbers:
    lower = _bits(torch.unflatten(blocks[..., :128], -1, (2, 64)), 4).flatten(-3)
    upper = _bits(torch.unflatten(blocks[..., 128:192], -1, (2, 32)), 2).flatten(-3)
    codes = (lower | upper << 4).view(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return BlockNumbers(torch.unflatten(codes, -1, (16, 16)), _float16(blocks, 208) * scales)


TYPES = {
    "Q4_0": GgmlType(4, 32, False, _q4_0),
    "Q4_1": GgmlType(4, 32, True, _q4_1),
    "Q4_K": GgmlType(4, 32, True, _q4_k),
    "Q5_0": GgmlType(8, 32, False, _q5_0),
    "Q5_1": GgmlType(8, 32, True, _q5_1),
    "Q5_K": GgmlType(8, 32, True, _q5_k),
    "Q6_K": GgmlType(8, 16, False, _q6_k),
    "Q8_0": GgmlType(8, 32, False, _q8_0),
}
