"""Checkpoints of AQLM, written code by code as inference_lib/src/aqlm/utils.py (`_dequantize_weight`) documents it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoint import Checkpoints, Sample, Stored, change_tensors, check_logits, write_projections
from tiny_models import start

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.shared.errors import ConfigError, LoadError

LEFT_OUT = {"linear_weights_not_to_quantize": [f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 2)]}


def draw(outputs: int, inputs: int, out_group: int, in_group: int, books: int, bits: int) -> Stored:
    rows, columns, dtype = outputs // out_group, inputs // in_group, torch.int8 if bits <= 8 else torch.int16
    codes = torch.randint(0, 1 << bits, (rows, columns, books))
    codebooks = (torch.randn(books, 1 << bits, out_group, in_group) * 0.02).half()
    scales = (torch.rand(rows, 1, 1, 1) + 0.5).half()
    groups = sum(codebooks[i].float()[codes[..., i]] for i in range(books))  # [rows, columns, out_group, in_group]
    numbers = (groups * scales.float()).transpose(1, 2).reshape(outputs, inputs)
    return {"codes": codes.to(dtype), "codebooks": codebooks, "scales": scales}, numbers


def write_aqlm(folder: Path, model: str, groups: tuple[int, int], books: int, bits: int) -> Checkpoints:
    """Keys of attention are left out in two layers."""
    sizes = {"out_group_size": groups[0], "in_group_size": groups[1]}
    said = {"quant_method": "aqlm", **sizes, "num_codebooks": books, "nbits_per_codebook": bits, **LEFT_OUT}
    left_out = [name.removesuffix(".weight") for name in LEFT_OUT["linear_weights_not_to_quantize"]]
    return write_projections(folder, model, said, lambda *shape: draw(*shape, *groups, books, bits), left_out)


SAMPLES = {"aqlm": Sample(lambda folder: write_aqlm(folder, "llama", (2, 4), 2, 8))}


@pytest.mark.parametrize(("groups", "books", "bits"), [((1, 8), 1, 12), ((2, 4), 2, 8), ((1, 16), 1, 5)])
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_aqlm(tmp_path: Path, model: str, groups: tuple[int, int], books: int, bits: int) -> None:
    made = write_aqlm(tmp_path, model, groups, books, bits)
    lines = check_logits(made).model.table.describe_unused()
    assert any(line.startswith("dequantized at load: model.layers.0") for line in lines)
    assert any(line.startswith("weights that are dequantized at load take 0.") for line in lines)
    wrong = "model.layers.1.self_attn.o_proj.scales"
    change_tensors(made, lambda name, value: value * float("nan") if name == wrong else value)
    with pytest.raises(LoadError, match=f"{wrong}: the checkpoint has a scale of nan"):
        start(made.packed)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"quant_method": "aqlm", "nbits_per_codebook": 17}, "codebooks of 17 bits: not known"),
        ({"quant_method": "aqlm", "in_group_size": 24}, "h.0.a has 256 inputs; a multiple of 24 is needed"),
    ],
)
def test_wrong_settings_are_refused(said: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        LinearLayers(WeightTable(torch.float32, torch.device("meta")), {"quantization_config": said}).make(
            [part("h.0.a", 128)], 256
        )
