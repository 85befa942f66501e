"""Quantized weights of linear layers in the order in which kernels with tensor cores read them.

The codes of BLOCK inputs lie together for all outputs, so that a tile is one run of memory: runs of 64 bytes were read
at half the speed. Of a block, byte j has the 4-bit codes of inputs j and BLOCK / 2 + j, the first one in its lower
half: each half of a tile is a run of inputs, and no number changes its place among threads. Scales and zeros are
transposed for the same reason.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.quantized.packed_weights import Codes, PackedWeights, dequantized

BLOCK = 128  # inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """A weight [outputs, inputs]: (code - zero) * scale * row_scale. Made by `to_blocks`."""

    codes: Tensor  # uint8 [blocks, outputs, BLOCK / 2], or 8-bit codes [blocks, outputs, BLOCK]; behind the inputs: 0
    kind: Codes
    inputs: int
    group: int  # inputs of a scale, a power of two from 16 or a multiple of BLOCK; 0: there are scales of rows alone
    scales: Tensor | None  # [groups, outputs], of whole blocks; of e8m0 as bytes
    zeros: Tensor | None  # [groups, outputs]; without groups [1, outputs]
    row_scales: Tensor | None  # [outputs], float or 16 bits
    table: tuple[float, ...] | None  # of TABLE4
    is_e8m0: bool

    @property
    def outputs(self) -> int:
        return self.codes.shape[1]

    @property
    def is_4bit(self) -> bool:
        return self.kind <= Codes.TABLE4

    def tensors(self) -> dict[str, Tensor]:
        made = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, "row_scales": self.row_scales}
        return {name: one for name, one in made.items() if one is not None}


def can_be_blocks(group: int) -> bool:
    """Whether kernels read groups of so many inputs; 0: scales of rows alone."""
    return group % BLOCK == 0 or group in (16, 32, 64)


def to_blocks(weights: PackedWeights) -> BlockWeights:
    """Brings the weight of one matrix, with a leading dimension of 1, into the order of blocks, in new memory."""
    codes, inputs = weights.codes[0], weights.inputs
    blocks = ceil_div(inputs, BLOCK)
    if weights.kind <= Codes.TABLE4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[:, :inputs]
        low, high = F.pad(codes, (0, blocks * BLOCK - inputs)).view(len(codes), blocks, 2, BLOCK // 2).unbind(2)
        blocked = low | high << 4
    else:
        blocked = F.pad(codes.view(torch.uint8), (0, blocks * BLOCK - inputs)).view(len(codes), blocks, BLOCK)
    scales, zeros = weights.scales, weights.zeros
    groups = ceil_div(blocks * BLOCK, weights.group) if weights.group else 1
    return BlockWeights(
        codes=blocked.transpose(0, 1).contiguous().view(codes.dtype),
        kind=weights.kind,
        inputs=inputs,
        group=weights.group,
        scales=None if scales is None else _transposed(scales[0], groups),
        zeros=None if zeros is None else _transposed(zeros[0].view(len(codes), -1), groups),
        row_scales=None if weights.row_scales is None else weights.row_scales[0].contiguous(),
        table=None if weights.table is None else tuple(weights.table.tolist()),
        is_e8m0=weights.is_e8m0,
    )


def dequantized_blocks(weights: BlockWeights) -> Tensor:
    """The reference of all kernels: the numbers that a weight stands for, float64 [outputs, inputs]."""
    stored = weights.codes.view(torch.uint8).transpose(0, 1)
    if weights.is_4bit:
        codes = torch.cat((stored & 15, stored >> 4), 2).flatten(1)[:, : weights.inputs]
        codes = F.pad(codes, (0, weights.inputs % 2))
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    else:
        codes = stored.flatten(1)[:, : weights.inputs].contiguous().view(weights.codes.dtype)
    scales, zeros, table = weights.scales, weights.zeros, weights.table
    groups = ceil_div(weights.inputs, weights.group) if weights.group else 1
    if zeros is not None:
        zeros = _transposed(zeros, weights.outputs)[None, :, :groups] if weights.group else zeros
    packed = PackedWeights(
        codes=codes[None].contiguous(),
        kind=weights.kind,
        inputs=weights.inputs,
        group=weights.group,
        scales=None if scales is None else _transposed(scales, weights.outputs)[None, :, :groups].contiguous(),
        zeros=None if zeros is None else zeros.contiguous(),
        row_scales=None if weights.row_scales is None else weights.row_scales[None],
        table=None if table is None else torch.tensor(table, dtype=torch.float32, device=codes.device),
        is_e8m0=weights.is_e8m0,
    )
    return dequantized(packed)[0]


def _transposed(matrix: Tensor, rows: int) -> Tensor:
    """With zeros behind, so that there are so many rows. Also of 8-bit floats, which not all operations take."""
    plain = matrix.view(torch.uint8) if matrix.dtype.itemsize == 1 else matrix
    made = F.pad(plain.t(), (0, 0, 0, rows - plain.shape[1])).contiguous()
    return made.view(matrix.dtype) if matrix.dtype.itemsize == 1 else made
