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

So above MOST_ROWS the weights are dequantized for each product.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

CODES, SCALES = "codes", "scales_and_offsets"
GROUPS = (256, 128, 64, 32)  # of inputs that torch knows
OUTPUTS = 16  # a multiple of these
MIDDLE = 8
MOST_ROWS = 128


def fits(group: int | None, shape: tuple[int, int], dtype: torch.dtype) -> bool:
    """shape: inputs and outputs. group: None for one group a row."""
    inputs, outputs = shape
    return dtype == torch.bfloat16 and outputs % OUTPUTS == 0 and _known_group(group, inputs) is not None


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
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    return {CODES: packed, SCALES: both.transpose(0, 1).contiguous()}


def product(x: Tensor, packed: Mapping[str, Tensor]) -> Tensor:
    """x bfloat16 [rows, inputs] -> [rows, outputs]."""
    group = x.shape[1] // len(packed[SCALES])
    made: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed[CODES], group, packed[SCALES])
    return made
