"""Numbers of 8 bits with scales: functions that the forms `Fp8W8A8` and `W8A16` share."""

import torch
from torch import Tensor

from blockyard.kernels.layers import rounding
from blockyard.kernels.layers.rounding import InputRounding, round_rows_reference

E4M3 = rounding.E4M3
MOST = rounding.MOST[E4M3]
FLOOR = rounding.FLOOR  # of scales


def expand(scales: Tensor, group: int | None, inputs: int) -> Tensor:
    """Scales [..., rows] or [..., rows, groups] of groups of inputs, of which the last may be incomplete, as
    [..., rows, 1] or [..., rows, inputs]."""
    if group is None:
        return scales[..., None]
    return scales.repeat_interleave(group, -1)[..., :inputs]


def to_e4m3(x: Tensor, group: int | None = None, most: float | None = None) -> tuple[Tensor, Tensor]:
    """Rounds x [rows, inputs] to e4m3 with a scale for each row, or each row and group.

    most: a row counts as having at most this absolute value, and larger numbers are clamped. Returns codes
    [rows, inputs] and scales float32 [rows] or [rows, groups].
    """
    made = round_rows_reference(x, InputRounding(E4M3, group, most))
    return made.codes, made.scales


def scaled_to_e4m3(x: Tensor, scales: Tensor) -> Tensor:
    """x / scales in e4m3, clamped: torch does not saturate on all devices."""
    return (x.float() / scales).clamp_(-MOST, MOST).to(E4M3)


def has_products(device: torch.device) -> bool:
    """Whether weights and inputs in e4m3 are multiplied there as in `Fp8W8A8`; other devices are said to, too."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def fill_e4m3(codes: Tensor, generator: torch.Generator, std: float) -> None:
    """Writes normally distributed codes [..., rows, inputs], one matrix at a time."""
    for one in codes.flatten(0, -3) if codes.dim() > 2 else [codes]:
        made = torch.empty(one.shape, device=generator.device).normal_(0.0, std, generator=generator)
        one.view(torch.uint8).copy_(made.clamp_(-MOST, MOST).to(E4M3).view(torch.uint8))
