"""How products with inputs of 8 bits round these, in plain torch: all kernels write the same bits.

A row has a scale of its own, or one for each `group` of its numbers, or the one that the file gives. Codes are e4m3, so
that the largest absolute value becomes 448, or int8, so that it becomes 127.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
MOST = {E4M3: 448.0, torch.int8: 127.0}  # what the largest absolute value of a row becomes
LOWEST_INT8 = -128
ROWS = 4  # with groups, memory is for a multiple of so many rows, so that scales of a group begin at 16 bytes
FLOOR = 1e-12  # of scales, so that zeros are not divided by zero


class RoundedRows(NamedTuple):
    """Rows in 8 bits."""

    codes: Tensor  # [rows, size], e4m3 or int8
    scales: Tensor  # float32 [rows] or [rows, groups], of which those of one group lie side by side
    dtype: torch.dtype  # of the rows before, and of what products make of them

    @property
    def group(self) -> int | None:
        """Numbers of a row with one scale; None: all."""
        return None if self.scales.dim() == 1 else -(-self.codes.shape[1] // self.scales.shape[1])


@dataclass(frozen=True, slots=True, eq=False)
class InputRounding:
    """How rows of one product are rounded."""

    dtype: torch.dtype  # of the codes: E4M3 or int8
    group: int | None = None  # numbers of a row that have a scale of their own; None: all
    most: float | None = None  # a row counts as having at most this absolute value, and larger numbers are clamped
    scale: Tensor | None = None  # float32, one number: the scale of all rows


def divided(x: Tensor, number: float) -> Tensor:
    """x / number, rounded as a division: on a GPU torch multiplies by the reciprocal of a Python number."""
    return x / torch.full_like(x, number)


def round_rows_reference(x: Tensor, rounding: InputRounding) -> RoundedRows:
    """x [rows, size] as `quantize_rows` rounds it, to the same bits."""
    most, group = MOST[rounding.dtype], rounding.group
    if rounding.scale is not None:
        groups = () if group is None else (-(-x.shape[1] // group),)
        scales = rounding.scale.float().clamp(min=FLOOR).expand(len(x), *groups)
    else:
        padded = F.pad(x.float(), (0, 0 if group is None else -x.shape[1] % group))
        parts = padded[:, None] if group is None else torch.unflatten(padded, 1, (-1, group))
        largest = parts.abs().amax(-1)
        largest = largest if rounding.most is None else largest.clamp(max=rounding.most)
        scales = divided(largest, most).clamp_(min=FLOOR)
        scales = scales[:, 0] if group is None else scales
    by_number = scales[:, None] if group is None else scales.repeat_interleave(group, 1)[:, : x.shape[1]]
    ratios = x.float() / by_number
    if rounding.dtype == E4M3:  # clamped, because torch does not saturate on all devices
        return RoundedRows(ratios.clamp_(-most, most).to(E4M3), scales, x.dtype)
    return RoundedRows(ratios.round_().clamp_(LOWEST_INT8, most).to(torch.int8), scales, x.dtype)
