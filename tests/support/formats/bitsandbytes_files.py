"""Writes checkpoints of bitsandbytes by the package itself."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import functional
from quantized_checkpoint import Checkpoints, is_projection, write
from torch import Tensor

Stored = tuple[dict[str, Tensor], Tensor]


def quantize(kind: str, is_nested: bool, storage: torch.dtype, weight: Tensor, blocksize: int = 64) -> Stored:
    """The tensors of a matrix by the last parts of their names, and the package's numbers.

    The package is given one block a row, because its product of the CPU takes blocks to begin anew at each row.
    """
    packed, state = functional.quantize_4bit(
        weight.reshape(-1, blocksize),
        blocksize=blocksize,
        compress_statistics=is_nested,
        quant_type=kind,
        quant_storage=storage,
    )
    numbers = functional.dequantize_4bit(packed, state).float().view(weight.shape)
    state.shape = weight.shape
    return {"weight": packed} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}, numbers


def quantize_8_bits(weight: Tensor) -> Stored:
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    order = torch.tensor(0, dtype=torch.uint8)
    return {"weight": codes, "SCB": scales, "weight_format": order}, codes.float() * scales[:, None] / 127


def store(how: partial[Stored], routers: bool, name: str, weight: Tensor) -> Stored | None:
    if not is_projection(name) and not (routers and name.endswith(".gate")):
        return None
    tensors, numbers = how(weight)
    return {f"{name}.{key}": value for key, value in tensors.items()}, numbers


def config_of(kind: str, **fields: Any) -> dict[str, Any]:
    bits = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return {"quantization_config": {"quant_method": "bitsandbytes", **bits, **fields}}


def write_bnb(
    folder: Path, model: str, kind: str, nested: bool = False, routers: bool = False, **how: Any
) -> Checkpoints:
    storage = how.pop("storage", "uint8")
    make: Any = partial(quantize, kind, nested, getattr(torch, storage), **how)
    make = quantize_8_bits if kind == "int8" else make
    said = config_of(kind, bnb_4bit_use_double_quant=nested, bnb_4bit_quant_storage=storage)
    return write(folder, model, partial(store, make, routers), {"config.json": said})
