"""Checkpoints in the layout that Quark exports, against the numbers that they stand for."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kept_forms import round_to_int8, write_int8
from quantized_checkpoint import Sample, check_logits
from quark_files import E4M3, FP8, INT8, MXFP4, round_inputs, write_quark

from blockyard.services.gpu_worker.quantization.formats.quark import QuarkScheme
from blockyard.shared.errors import ConfigError

CASES = {
    "fp8, static": (FP8 | {"qscheme": "per_tensor"}, FP8 | {"qscheme": "per_tensor", "is_dynamic": False}, E4M3),
    "fp8, rows": (FP8 | {"qscheme": "per_channel"}, FP8 | {"qscheme": "per_channel", "is_dynamic": True}, E4M3),
    "int8, static": (INT8 | {"qscheme": "per_channel"}, INT8 | {"qscheme": "per_tensor"}, torch.int8),
    "int8, weights alone": (INT8 | {"qscheme": "per_channel"}, None, None),
    "mxfp4": (MXFP4, MXFP4 | {"is_dynamic": True}, None),
}


SAMPLES = {"quark": Sample(write_int8, round_to_int8)}


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_logits(tmp_path: Path, model: str, kind: str) -> None:
    weights, inputs, rounded = CASES[kind]
    static = inputs is not None and not inputs.get("is_dynamic")
    made = write_quark(tmp_path, model, weights, inputs)
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


def test_settings_by_the_class_of_a_layer_are_refused() -> None:
    said = {"layer_type_quant_config": {"Linear": {"weight": {"dtype": "int8"}}}}
    with pytest.raises(ConfigError, match="layer_type_quant_config Linear: settings by the class of a layer"):
        QuarkScheme(said, torch.device("cpu"), lambda what, name: None)
