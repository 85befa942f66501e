"""`Table4A16`: codes of 4 bits that stand for the numbers of a table; inputs stay as they are.

A weight [outputs, inputs] is table[code] * scale, times the scale of its row where the form has some. Its tensors:

- `codes` uint8 [outputs, ceil(inputs / 2)]: two codes a byte, as `W4A16` has them (`w4a16.pack`).
- `scales` [outputs, groups] of `group` inputs side by side, of which the last may be incomplete, in float32, 16 bits,
  e4m3 or e8m0.
- `row_scales` float32 [outputs], if `row_scales`: one scale for a whole matrix, which is that of each of its rows, so
  that matrices with different ones share a product.

Kernels know groups of 16, 32 and 64; the plain product takes any.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.quantized.packed_weights import Codes, PackedWeights
from blockyard.services.gpu_worker.quantization.kept.eight_bits import expand
from blockyard.services.gpu_worker.quantization.kept.form import (
    DUMMY_SCALE,
    KeptForm,
    KeptTensor,
    fill_codes,
    fill_numbers,
    fill_scales,
    packed_codes,
)
from blockyard.services.gpu_worker.quantization.kept.w4a16 import unpack

CODES, SCALES, ROW_SCALES = "codes", "scales", "row_scales"
Table = tuple[float, ...]  # of 16 numbers, by code

_SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1: Table = (*_SIZES, *(-size for size in _SIZES))  # of OCP's MX formats and of nvfp4
_SIZES_OF_12 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4: Table = (*(size / 12 for size in _SIZES_OF_12), *(-size / 12 for size in _SIZES_OF_12))  # of bitsandbytes
# quantiles of the normal distribution between -1 and 1: "QLoRA", arXiv 2305.14314, appendix E
NF4: Table = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@cache
def _numbers(table: Table, device: torch.device) -> Tensor:
    """[16]. A step copies nothing to the device: CUDA graphs refuse that while they are captured."""
    return torch.tensor(table, device=device)


@dataclass(frozen=True, slots=True)
class Table4A16(KeptForm):
    """Implements `PackedForm`. The module says what its tensors hold."""

    table: Table
    group: int
    scales: torch.dtype = torch.float32
    row_scales: bool = False
    name = "Table4A16"
    multiplies_on_host = False

    def tensors(self) -> Mapping[str, KeptTensor]:
        made = {CODES: KeptTensor(torch.uint8, inputs=2), SCALES: KeptTensor(self.scales, inputs=self.group)}
        return made | ({ROW_SCALES: KeptTensor(torch.float32)} if self.row_scales else {})

    def dequantize(self, kept: Mapping[str, Tensor], inputs: int, dtype: torch.dtype) -> Tensor:
        codes = unpack(kept[CODES], inputs)
        values = _numbers(self.table, codes.device)[codes.int()]
        values *= expand(kept[SCALES].float(), self.group, inputs)
        if self.row_scales:
            values *= kept[ROW_SCALES][..., None]
        return values.to(dtype)

    def packed(self, kept: Mapping[str, Tensor], inputs: int) -> PackedWeights:
        codes, scales, rows = kept[CODES], kept[SCALES], kept.get(ROW_SCALES)
        if self.table == E2M1:
            return packed_codes(Codes.E2M1, codes, inputs, self.group, scales, row_scales=rows)
        table = _numbers(self.table, codes.device)
        return packed_codes(Codes.TABLE4, codes, inputs, self.group, scales, row_scales=rows, table=table)

    def fill(self, kept: Mapping[str, Tensor], generator: torch.Generator) -> None:
        """Scales in 8 bits that no scale of the row corrects are the nearest that there is, up to 1.4 times off."""
        fill_codes(kept[CODES], generator)
        scale = DUMMY_SCALE / (sum(number * number for number in self.table) / len(self.table)) ** 0.5
        if self.row_scales:
            fill_numbers(kept[SCALES], 1.0)
            fill_scales(kept[ROW_SCALES], scale, generator)
        elif kept[SCALES].dtype.itemsize > 1:
            fill_scales(kept[SCALES], scale, generator)
        else:  # without a sign; formats with such scales have a table that is even about zero
            fill_numbers(kept[SCALES], scale)


def to_table(x: Tensor, table: Table, group: int) -> tuple[Tensor, Tensor]:
    """Rounds x [rows, inputs] to the nearest numbers of a table between -1 and 1, with a scale for each `group` inputs:
    their largest absolute value. Returns codes uint8 [rows, inputs] and scales float32 [rows, groups]."""
    inputs, numbers = x.shape[-1], torch.tensor(table, device=x.device)
    grouped = torch.unflatten(F.pad(x.float(), (0, -inputs % group)), -1, (-1, group))
    scales = grouped.abs().amax(-1)
    # by the reciprocal, as bitsandbytes does, so that what lies between two numbers gets the same one
    wanted = grouped * scales.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()[..., None]
    order = numbers.argsort(stable=True)
    ordered = numbers[order]
    codes = order[torch.bucketize(wanted, (ordered[1:] + ordered[:-1]) / 2)]
    return codes.to(torch.uint8).flatten(-2)[..., :inputs], scales
