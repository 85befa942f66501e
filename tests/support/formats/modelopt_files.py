"""Writes checkpoints of ModelOpt, in the layout that it documents.

Layout of nvfp4: modelopt/torch/export/quant_utils.py and quantization/qtensor/nvfp4_tensor.py of NVIDIA's
Model-Optimizer; of hf_quant_config.json: "Unified HuggingFace checkpoint" in its documentation.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from quantized_checkpoint import Checkpoints, is_projection, write
from torch import Tensor

E4M3 = torch.float8_e4m3fn
INPUT_SCALE = 0.03


def value_of(code: int) -> float:
    """e2m1: sign, two bits of exponent, one of mantissa; subnormal where the exponent is 0."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = 0.5 * mantissa if exponent == 0 else (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1)
    return -size if code >> 3 else size


VALUES = torch.tensor([value_of(code) for code in range(16)])
Stored = tuple[dict[str, Tensor], Tensor]


def nvfp4(weight: Tensor) -> Stored:
    rows, columns = weight.shape
    codes = torch.randint(0, 16, weight.shape)
    scale = (torch.rand(rows, columns // 16) * 300 + 1).to(E4M3)
    whole = torch.rand(()) * 1e-4 + 1e-4
    tensors = {
        "weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scale,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(INPUT_SCALE),
    }
    return tensors, VALUES[codes] * scale.float().repeat_interleave(16, 1) * whole


def e4m3_codes(weight: Tensor) -> Tensor:
    made = torch.randint(0, 256, weight.shape, dtype=torch.uint8)
    return torch.where(made & 127 == 127, made - 1, made).view(E4M3)


def fp8(weight: Tensor) -> Stored:
    codes, scale = e4m3_codes(weight), torch.rand(()) * 0.002 + 0.0005
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(INPUT_SCALE)}
    return tensors, codes.float() * scale


def fp8_blocks(weight: Tensor) -> Stored:
    codes, (rows, columns) = e4m3_codes(weight), weight.shape
    scale = torch.rand(-(-rows // 128), 1, -(-columns // 128), 1) * 0.002 + 0.0005
    whole = scale[:, 0, :, 0].repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return {"weight": codes, "weight_scale": scale}, codes.float() * whole


STORES = {"NVFP4": nvfp4, "FP8": fp8, "FP8_PB_WO": fp8_blocks}


def store(algorithms: dict[str, str], name: str, weight: Tensor) -> Stored | None:
    """algorithms: by a part of the name; the first one counts, "" is any."""
    if not is_projection(name):
        return None
    found = next((algorithm for part, algorithm in algorithms.items() if part in name), "")
    if not found:
        return None
    tensors, numbers = STORES[found](weight)
    return {f"{name}.{key}": value for key, value in tensors.items()}, numbers


def write_modelopt(folder: Path, model: str, algorithms: dict[str, str], **fields: Any) -> Checkpoints:
    inner = {"quant_algo": algorithms[""]} | fields
    return write(folder, model, partial(store, algorithms), {"hf_quant_config.json": of_file(inner)})


def of_file(inner: dict[str, Any]) -> dict[str, Any]:
    return {"producer": {"name": "modelopt", "version": "0.23"}, "quantization": inner}


def add_settings(made: Checkpoints, said: str) -> None:
    """As the launcher does, which merges the file into config.json."""
    file = made.packed / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | json.loads(said)))


def round_statically(x: Tensor) -> Tensor:
    return torch.clamp(x / INPUT_SCALE, -448, 448).to(E4M3).float() * INPUT_SCALE
