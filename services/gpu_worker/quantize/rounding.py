"""Rounds matrices to nearest and stores them in the layouts of compressed-tensors.

Scales equal the package's (`calculate_qparams`): by the largest absolute value, or with zeros by the range.
`quantization/formats/stored_codes.py` describes the layouts.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.quantization.formats.fp8 import round_blocks
from blockyard.services.gpu_worker.quantization.kept import w4a16
from blockyard.services.gpu_worker.quantization.kept.eight_bits import FLOOR, expand, to_e4m3
from blockyard.shared.quantization.table import FP8, FP8_BLOCK, INT8, W4

BLOCK = (128, 128)
WORD_BYTES = 4
Made = tuple[dict[str, Tensor], Tensor]  # tensors to store by key, and the numbers that they stand for


class Rounding(msgspec.Struct, frozen=True):
    """The settings of `blockyard quantize`."""

    to: str
    group: int = 128  # inputs of a scale, of w4
    asymmetric: bool = False  # w4 has zeros
    ignore: list[str] = []  # names, globs or expressions of matrices that stay as they are


def round_matrix(weight: Tensor, how: Rounding) -> Made:
    """weight: [outputs, inputs]."""
    if how.to == INT8:
        scales = weight.float().abs().amax(1, keepdim=True).div_(127).clamp_(min=FLOOR)
        codes = (weight.float() / scales).round_().clamp_(-128, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales
    if how.to == FP8:
        codes, scales = to_e4m3(weight)
        return {"weight": codes, "weight_scale": scales[:, None]}, codes.float() * scales[:, None]
    if how.to == FP8_BLOCK:
        codes, scales = round_blocks(weight, BLOCK)
        numbers = codes.float() * expand(scales, BLOCK[1], weight.shape[1])
        return {"weight": codes, "weight_scale": scales[:: BLOCK[0]]}, numbers
    return _round_to_4_bits(weight, how.group, how.asymmetric)


def _round_to_4_bits(weight: Tensor, group: int, asymmetric: bool) -> Made:
    """Scales have the dtype of the weight."""
    groups = torch.unflatten(weight.float(), 1, (-1, group))
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    scales = (high - low) / 15 if asymmetric else torch.maximum(high, -low) / 7.5
    scales = scales.clamp_(min=float(torch.finfo(weight.dtype).tiny)).to(weight.dtype)
    whole = scales.float()
    zeros = (-low / whole).round_().clamp_(0, 15) if asymmetric else torch.full_like(whole, w4a16.MIDDLE)
    codes = (groups / whole[..., None]).round_().add_(zeros[..., None]).clamp_(0, 15)
    numbers = (codes - zeros[..., None]).mul_(whole[..., None]).flatten(1)
    tensors = {
        "weight_packed": _words(codes.flatten(1)),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if asymmetric:
        tensors["weight_zero_point"] = _words(zeros.t()).t().contiguous()
    return tensors, numbers


def _words(codes: Tensor) -> Tensor:
    """Codes [rows, n] from 0 to 15 -> int32 [rows, ceil(n / 8)]."""
    some = w4a16.pack(codes)
    whole = F.pad(some, (0, -some.shape[1] % WORD_BYTES))
    return whole.flatten().view(torch.int32).view(len(some), -1)  # of one row any stride is contiguous


def config(how: Rounding, ignored: Sequence[str]) -> dict[str, Any]:
    """quantization_config. ignored: matrices that stay as they are."""
    kind = {"num_bits": 4 if how.to == W4 else 8, "type": "float" if how.to in (FP8, FP8_BLOCK) else "int"}
    weights: dict[str, Any] = kind | {"symmetric": not how.asymmetric, "dynamic": False, "strategy": "channel"}
    inputs: dict[str, Any] | None = kind | {"symmetric": True, "dynamic": True, "strategy": "token"}
    if how.to == FP8_BLOCK:
        weights |= {"strategy": "block", "block_structure": list(BLOCK)}
        inputs = kind | {"symmetric": True, "dynamic": True, "strategy": "group", "group_size": BLOCK[1]}
    elif how.to == W4:
        weights |= {"strategy": "group", "group_size": how.group}
        inputs = None
    format_ = {W4: "pack-quantized", INT8: "int-quantized"}.get(how.to, "float-quantized")
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": format_}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": list(ignored),
    }
