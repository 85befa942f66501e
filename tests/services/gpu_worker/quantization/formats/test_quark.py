"""Checkpoints in the layout that Quark exports, against the numbers that they stand for."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoint import check_logits, is_projection, write
from torch import Tensor

from blockyard.services.gpu_worker.quantization.formats.quark import QuarkScheme
from blockyard.shared.errors import ConfigError

E4M3 = torch.float8_e4m3fn
INPUT_SCALE = 0.03
VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # of e2m1, by OCP's Microscaling Formats v1.0
FP8, INT8 = {"dtype": "fp8_e4m3"}, {"dtype": "int8", "symmetric": True}
MXFP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


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


CASES = {
    "fp8, static": (FP8 | {"qscheme": "per_tensor"}, FP8 | {"qscheme": "per_tensor", "is_dynamic": False}, E4M3),
    "fp8, rows": (FP8 | {"qscheme": "per_channel"}, FP8 | {"qscheme": "per_channel", "is_dynamic": True}, E4M3),
    "int8, static": (INT8 | {"qscheme": "per_channel"}, INT8 | {"qscheme": "per_tensor"}, torch.int8),
    "int8, weights alone": (INT8 | {"qscheme": "per_channel"}, None, None),
    "mxfp4": (MXFP4, MXFP4 | {"is_dynamic": True}, None),
}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_logits(tmp_path: Path, model: str, kind: str) -> None:
    weights, inputs, rounded = CASES[kind]
    static = inputs is not None and not inputs.get("is_dynamic")
    said = {
        "quant_method": "quark",
        "global_quant_config": {"weight": weights, "input_tensors": inputs, "output_tensors": None, "bias": None},
        "layer_quant_config": {"*layers.1.self_attn.o_proj": {"weight": None}},
        "exclude": ["lm_head"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
    }
    made = write(tmp_path, model, partial(store, weights, static), {"config.json": {"quantization_config": said}})
    runner = check_logits(made, None if rounded is None else partial(round_inputs, rounded, static))
    notes = runner.model.table.describe_unused()
    assert any("stay 16 bits" in note for note in notes) == (kind == "mxfp4")


@pytest.mark.parametrize(
    ("weight", "error"),
    [
        ({"dtype": "uint4"}, "dtype 'uint4' is none of fp8_e4m3, int8, fp4"),
        ({"dtype": "fp4", "qscheme": "per_group", "group_size": 16}, "fp4 is read in groups of 32"),
        ({"dtype": "int8", "qscheme": "per_group"}, "int8 is read with qscheme per_tensor or per_channel"),
        ({}, "missing required field `dtype`"),
    ],
)
def test_wrong_settings_are_refused(weight: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        said = {"global_quant_config": {"weight": weight}}
        QuarkScheme(said, torch.device("cpu"), lambda what, name: None)
