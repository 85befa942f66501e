"""Writes checkpoints by the package compressed-tensors, with the numbers that it reads from them again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from quantized_checkpoint import Checkpoints, is_projection, write
from tiny_checkpoint import Tiny
from torch import Tensor, nn

INPUT_SCALE, INPUT_ZERO = 0.03, 9
PACK, INT, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"


def unpack_fp4(packed: Tensor, rows: int, columns: int) -> Tensor:
    made: Tensor = unpack_fp4_from_uint8(packed, rows, columns, dtype=torch.float32)
    return made


def scheme(weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> QuantizationScheme:
    return QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
    )


def qparams(weight: Tensor, args: QuantizationArgs, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scales and zeros as the package computes them of the ranges of what shares a scale."""
    rows, columns = weight.shape
    if args.strategy == "block":
        high, wide = args.block_structure
        padded = nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
        some = padded.reshape(-(-rows // high), high, -1, wide)
        return calculate_qparams(some.amin((1, 3)), some.amax((1, 3)), args, whole)
    size = {"tensor": rows * columns, "channel": columns}.get(args.strategy, args.group_size)
    some = weight.reshape(1 if args.strategy == "tensor" else rows, -1, size)
    low, high = some.amin(2), some.amax(2)
    if args.strategy == "tensor":
        low, high = low.reshape(()), high.reshape(())
    return calculate_qparams(low, high, args, whole)


def packed(format_: str, own: QuantizationScheme, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What the package stores of a matrix, and what it reads from that."""
    args = own.weights
    whole = None
    if format_ == NVFP4:
        whole = generate_gparam(weight.amin(), weight.amax())
    scale, zero = qparams(weight, args, whole)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    if whole is not None:
        state["weight_global_scale"] = whole
    compressor = BaseCompressor.get_value_from_registry(CompressionFormat(format_).value)
    made = compressor.compress(state, own)
    if args.type == "float" and args.group_size is not None:  # the package reads these as bfloat16
        scales = made["weight_scale"].float() if whole is not None else torch.exp2(made["weight_scale"].float() - 127)
        codes = made["weight"].float() if format_ == MXFP8 else unpack_fp4(made["weight_packed"], *weight.shape)
        numbers = codes * (scales / (1 if whole is None else whole)).repeat_interleave(args.group_size, 1)
    else:
        numbers = compressor.decompress(dict(made), own)["weight"].float()
    return {key: value.data for key, value in made.items()}, numbers


def settings(format_: str, own: QuantizationScheme, ignore: list[str], of_group: str = "group_0") -> dict[str, Any]:
    """quantization_config."""
    config = QuantizationConfig(config_groups={of_group: own}, format=format_, ignore=[])
    made: dict[str, Any] = json.loads(config.model_dump_json())
    return made | {"quant_method": "compressed-tensors", "ignore": ignore}


def write_packed(
    folder: Path,
    model: str | Tiny,
    format_: str,
    own: QuantizationScheme,
    change: Callable[[str, dict[str, Tensor]], None] | None = None,
    of_group: str = "group_0",
    **said: Any,
) -> Checkpoints:
    left_out = ["lm_head"]

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name):
            return None
        if weight.shape[1] % (own.weights.group_size or 1):
            left_out.append(name)
            return None
        stored, numbers = packed(format_, own, weight)
        inputs = own.input_activations
        if inputs is not None and inputs.dynamic is False and format_ in (INT, FLOAT):
            stored["input_scale"] = torch.tensor([INPUT_SCALE])
            if not inputs.symmetric:
                stored["input_zero_point"] = torch.tensor([INPUT_ZERO], dtype=torch.int8)
        if change is not None:
            change(name, stored)
        return {f"{name}.{key}": value for key, value in stored.items()}, numbers

    quantization = settings(format_, own, left_out, of_group) | said
    return write(folder, model, store, {"config.json": {"quantization_config": quantization}})
