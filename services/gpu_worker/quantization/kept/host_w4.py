"""The CPU's product of 4-bit weights, `torch.ops.aten._weight_int4pack_mm_for_cpu`, for few rows in bfloat16.

A weight is (code - 8) * scale + offset there, with scales and offsets of groups in the dtype of the inputs; offsets are
(8 - zero) * scale. They are rounded to bfloat16, as the whole weight is where it is dequantized. In float32 torch has
no quick product. Microseconds of the layers of a Qwen3-0.6B block (1024 x 4096, 2048 x 1024, 1024 x 6144, 3072 x 1024)
together, one thread (AMD EPYC, AVX-512, torch 2.13), medians of runs in turn on a machine that is in use:

    rows   bfloat16   4 bits, groups of 128   dequantized each time
    1        6,400          2,500
    4        5,700          4,200
    16       9,100         15,300
    64      25,200         43,700                  101,000
    256     55,700                               125,000

So above MOST_ROWS the weights are dequantized for each product, from the packed codes: they are in memory once.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

CODES, SCALES = "codes", "scales_and_offsets"
GROUPS = (256, 128, 64, 32)  # of inputs that torch knows
OUTPUTS = 16  # a multiple of these
MIDDLE = 8
MOST_ROWS = 128
TRIAL_INPUTS, MOST_ROWS_OF_BLOCK = 32, 128  # of the trials that show torch's layout
ROWS_AT_ONCE = 4 * MOST_ROWS_OF_BLOCK  # whole blocks, whose codes in four bytes each stay in a processor's cache


def fits(group: int | None, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """shape: inputs and outputs. group: None for one group a row."""
    inputs, outputs = shape
    is_known = _known_group(group, inputs) is not None and outputs % OUTPUTS == 0
    return is_known and dtype == torch.bfloat16 and _is_layout_known()


def _known_group(group: int | None, inputs: int) -> int | None:
    """The group that torch is told: a row's group is cut into several."""
    known = GROUPS if group is None else (group,) if group in GROUPS else ()
    return next((one for one in known if inputs % one == 0), None)


def pack(codes: Tensor, scales: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    """codes uint8 [outputs, inputs]; scales, zeros float32 [outputs, groups]."""
    inputs, groups = codes.shape[1], scales.shape[1]
    group = _known_group(None if groups == 1 else inputs // groups, inputs)
    assert group is not None
    scales, zeros = (one.expand(-1, inputs // group) for one in (scales, zeros))
    rounded = scales.bfloat16()
    both = torch.stack((rounded, ((MIDDLE - zeros) * rounded.float()).bfloat16()), -1)  # [outputs, groups, 2]
    convert = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    packed = torch.cat([convert(some.int(), 1) for some in torch.split(codes, ROWS_AT_ONCE)])
    return {CODES: packed, SCALES: both.transpose(0, 1).contiguous()}


def dequantize(packed: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    """Returns [outputs, inputs] in bfloat16. shape: inputs and outputs."""
    inputs, outputs = shape
    scales, offsets = packed[SCALES].float().permute(2, 1, 0)  # [outputs, groups] each
    values = torch.unflatten(unpack(packed[CODES], (outputs, inputs)).float().sub_(MIDDLE), 1, (scales.shape[1], -1))
    return values.mul_(scales[..., None]).add_(offsets[..., None]).flatten(1).bfloat16()


def unpack(packed: Tensor, shape: tuple[int, int]) -> Tensor:
    """Returns the codes uint8 [outputs, inputs] of what torch has packed. shape: outputs and inputs.

    Torch packs blocks of outputs, of which the last may be smaller, each with its inputs in turn. How many outputs, and
    their order within a block, depend on the processor.
    """
    (outputs, inputs), block = shape, _rows_of_block()
    halves = torch.stack((packed & 15, packed >> 4), -1).view(-1)
    whole = outputs // block * block
    found = [_unpack_blocks(halves[: whole * inputs], inputs, block)] if whole else []
    if whole < outputs:
        found.append(_unpack_blocks(halves[whole * inputs :], inputs, outputs - whole))
    return found[0] if len(found) == 1 else torch.cat(found)


def _unpack_blocks(halves: Tensor, inputs: int, rows: int) -> Tensor:
    return halves.view(-1, inputs, rows)[..., _places(rows)].transpose(1, 2).reshape(-1, inputs)


def _packed_halves(codes: Tensor) -> Tensor:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return torch.stack((packed & 15, packed >> 4), -1).view(-1)


@cache
def _rows_of_block() -> int:
    """Outputs that are packed together: as many codes are of the first input before one of the second."""
    columns = torch.arange(TRIAL_INPUTS).clamp(max=1).expand(MOST_ROWS_OF_BLOCK, -1)
    return int(_packed_halves(columns.contiguous()).nonzero()[0])


@cache
def _places(rows: int) -> Tensor:
    """Where each output of a block of so many is."""
    numbers = torch.arange(rows)[:, None].expand(-1, TRIAL_INPUTS).contiguous()
    low, high = (_packed_halves(one)[:rows].long() for one in (numbers % 16, numbers // 16))
    return (low + 16 * high).argsort()


@cache
def _is_layout_known() -> bool:
    """Whether packed codes can be unpacked again on this processor, for products of many rows."""
    shape = (2 * MOST_ROWS_OF_BLOCK + OUTPUTS, TRIAL_INPUTS)
    codes = torch.arange(shape[0] * shape[1]).mul_(7).remainder_(16).view(shape)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return torch.equal(unpack(packed, shape).long(), codes)


def product(x: Tensor, packed: Mapping[str, Tensor]) -> Tensor:
    """x bfloat16 [rows, inputs] -> [rows, outputs]."""
    group = x.shape[1] // len(packed[SCALES])
    made: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed[CODES], group, packed[SCALES])
    return made
