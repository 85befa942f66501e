"""Writes checkpoints in the layout that Quark exports ("Exporting to Hugging Face safetensors")."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from quantized_checkpoint import Checkpoints, is_projection, write
from torch import Tensor

E4M3 = torch.float8_e4m3fn
INPUT_SCALE = 0.03
FP8, INT8 = {"dtype": "fp8_e4m3"}, {"dtype": "int8", "symmetric": True}
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of e2m1, by OCP's Microscaling Formats v1.0


def store(weights: dict[str, Any], static: bool, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    rows, columns = weight.shape
    if not is_projection(name) or name.endswith("layers.1.self_attn.o_proj"):
        return None
    if weights["dtype"] == "fp4":
        codes, exponents = torch.randint(0, 16, weight.shape), torch.randint(117, 121, (rows, columns // 32))
        signed = torch.tensor([*VALUES, *(-value for value in VALUES)])[codes]
        numbers = signed * torch.exp2(exponents.float() - 127).repeat_interleave(32, 1)
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        return {f"{name}.weight": packed, f"{name}.weight_scale": exponents.to(torch.uint8)}, numbers
    scale = torch.rand(() if weights["qscheme"] == "per_tensor" else (rows,)) * 0.002 + 0.0005
    codes = (weight * 200).clamp(-127, 127).to(E4M3 if weights["dtype"] == "fp8_e4m3" else torch.int8)
    tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scale}
    if static:
        tensors[f"{name}.input_scale"] = torch.tensor(INPUT_SCALE)
    return tensors, codes.float() * scale.reshape(-1, 1)


def round_inputs(kind: torch.dtype, static: bool, x: Tensor) -> Tensor:
    most = 448 if kind == E4M3 else 127
    scale = torch.tensor(INPUT_SCALE) if static else x.abs().amax(1, keepdim=True).clamp(min=1e-9) / most
    codes = (x / scale).clamp(-448, 448).to(E4M3) if kind == E4M3 else (x / scale).round().clamp(-128, 127)
    return codes.float() * scale


def write_quark(folder: Path, model: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Checkpoints:
    """weights, inputs: of global_quant_config."""
    static = inputs is not None and not inputs.get("is_dynamic")
    said = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weights, "input_tensors": inputs, "output_tensors": None, "bias": None},
        "layer_quant_config": {"*layers.1.self_attn.o_proj": {"weight": None}},
        "exclude": ["lm_head"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }
    return write(folder, model, partial(store, weights, static), {"config.json": {"quantization_config": said}})
