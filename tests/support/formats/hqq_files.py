"""Writes checkpoints of HQQ, in the layout of hqq/core/quantize.py and bitpack.py."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from quantized_checkpoint import Checkpoints, is_projection, write
from torch import Tensor

PACKED = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}  # integers of an element


def pack(codes: Tensor, bits: int) -> Tensor:
    """Row r is in bits of element r % step, the first rows in the upper bits; 3 bits in int32, else in uint8."""
    count = PACKED[bits]
    step = -(-len(codes) // count)
    parts = F.pad(codes, (0, 0, 0, count * step - len(codes))).view(count, step, -1)
    packed = sum(one << bits * (count - 1 - i) for i, one in enumerate(parts))
    return packed.to(torch.int32 if bits == 3 else torch.uint8)


def store(
    params: dict[str, Any], as_float: bool, only: str, name: str, weight: Tensor
) -> tuple[dict[str, Tensor], Tensor] | None:
    if not (is_projection(name) or name.endswith(".gate")) or only not in name:
        return None
    bits, group, axis = params["nbits"], params["group_size"], params["axis"]
    if group is None:
        codes = torch.randint(0, 1 << bits, weight.shape)
    else:
        size = (-1, group) if axis == 1 else (group, -1)
        codes = torch.randint(0, 1 << bits, (weight.numel(),)).view(size)
    shape = (len(codes), 1) if axis == 1 else (1, codes.shape[1])
    middle, most = (1 << bits) / 2, 1 << bits
    scale = (torch.rand(shape) + 0.5) * 0.3 / most
    zero = middle + (torch.rand(shape) - 0.5) * middle / 2
    packed = pack(codes, bits)
    tensors = {
        "W_q": packed.contiguous().view(torch.float16) if as_float else packed,
        "scale": scale,
        "zero": zero,
        "nbits": torch.tensor(bits, dtype=torch.int32),
        "axis": torch.tensor(axis, dtype=torch.int32),
        "shape": torch.tensor(weight.shape, dtype=torch.int32),
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        "view_as_float": torch.tensor(as_float, dtype=torch.uint8),
    }
    if group is not None:
        tensors["group_size"] = torch.tensor(group, dtype=torch.int32)
    return {f"{name}.{key}": value for key, value in tensors.items()}, ((codes - zero) * scale).view(weight.shape)


def write_hqq(
    folder: Path,
    model: str,
    bits: int = 4,
    group: int | None = 32,
    axis: int = 1,
    as_float: bool = False,
    only: str = "",
) -> Checkpoints:
    params = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True, "optimize": True}
    config: dict[str, Any] = {"weight_quant_params": params, "scale_quant_params": None, "zero_quant_params": None}
    config = {only: config} if only else config
    said = {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}
    files = {"config.json": {"quantization_config": said}}
    return write(folder, model, partial(store, params, as_float, only), files)
