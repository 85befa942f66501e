"""Formats that are dequantized at load, written code by code as their projects document them.

AQLM: inference_lib/src/aqlm/utils.py (`_dequantize_weight`). SqueezeLLM: squeezellm/quant.py (`pack2`). QQQ:
QQQ/gptq/qlinear/qlinear_marlin.py (`_get_perms`, `pack`).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from dequantized_files import aqlm, qqq, squeezellm, write_all
from quantized_checkpoint import change_tensors, check_logits
from tiny_models import start

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.dense import UnquantizedLinear
from blockyard.shared.errors import ConfigError, LoadError

LEFT_OUT = {"linear_weights_not_to_quantize": [f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 2)]}


@pytest.mark.parametrize(("groups", "books", "bits"), [((1, 8), 1, 12), ((2, 4), 2, 8), ((1, 16), 1, 5)])
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_aqlm(tmp_path: Path, model: str, groups: tuple[int, int], books: int, bits: int) -> None:
    sizes = {"out_group_size": groups[0], "in_group_size": groups[1]}
    said = {"quant_method": "aqlm", **sizes, "num_codebooks": books, "nbits_per_codebook": bits, **LEFT_OUT}
    made = write_all(tmp_path, model, said, lambda *shape: aqlm(*shape, *groups, books, bits))
    lines = check_logits(made).model.table.describe_unused()
    assert any(line.startswith("dequantized at load: model.layers.0") for line in lines)
    assert any(line.startswith("weights that are dequantized at load take 0.") for line in lines)
    wrong = "model.layers.1.self_attn.o_proj.scales"
    change_tensors(made, lambda name, value: value * float("nan") if name == wrong else value)
    with pytest.raises(LoadError, match=f"{wrong}: the checkpoint has a scale of nan"):
        start(made.packed)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("model", "bits", "sparse"), [("llama", 4, False), ("mixtral", 4, True), ("llama", 3, True)])
def test_squeezellm(tmp_path: Path, model: str, bits: int, sparse: bool) -> None:
    said = {"quant_method": "squeezellm", "wbits": bits}
    made = write_all(tmp_path, model, said, lambda *shape: squeezellm(*shape, bits, sparse))
    lines = check_logits(made).model.table.describe_unused()
    assert any(line.startswith("dequantized at load: model.layers.0") for line in lines)
    if sparse:
        wrong = "model.layers.1.self_attn.o_proj.cols"
        change_tensors(made, lambda name, value: value + 60 if name == wrong else value)
        with pytest.raises(LoadError, match=f"{wrong}: the checkpoint has .*, expected 0 to 63"):
            start(made.packed)


@pytest.mark.parametrize("group", [128, -1])
def test_qqq(group: int) -> None:
    stored, numbers = qqq(128, 256, group > 0)
    table = WeightTable(torch.float32, torch.device("cpu"))
    said = {"quant_method": "qqq", "wbits": 4, "group_size": group}
    linear = LinearLayers(table, {"quantization_config": said}).make([part("h.0.a", 128)], 256)
    for key, value in stored.items():
        table.put(f"h.0.a.{key}", value.contiguous())
    table.check_complete()
    table.finish()
    assert isinstance(linear.method, UnquantizedLinear)
    torch.testing.assert_close(linear.method.weight, numbers)
    assert any(line.startswith("dequantized at load: h.0.a") for line in table.describe_unused())


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"quant_method": "aqlm", "nbits_per_codebook": 17}, "codebooks of 17 bits: not known"),
        ({"quant_method": "aqlm", "in_group_size": 24}, "h.0.a has 256 inputs; a multiple of 24 is needed"),
        ({"quant_method": "squeezellm", "wbits": 2}, "wbits 2: 3 and 4 are read"),
        ({"quant_method": "qqq", "group_size": 64}, "group_size 64: 4, and -1 or 128"),
    ],
)
def test_wrong_settings_are_refused(said: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        LinearLayers(WeightTable(torch.float32, torch.device("meta")), {"quantization_config": said}).make(
            [part("h.0.a", 128)], 256
        )
