"""Checkpoints of SqueezeLLM, written code by code as squeezellm/quant.py (`pack2`) documents it."""

from pathlib import Path

import pytest
import torch
from packed_words import pack_words
from quantized_checkpoint import Checkpoints, Sample, Stored, change_tensors, check_logits, write_projections
from tiny_models import start

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.shared.errors import ConfigError, LoadError


def draw(outputs: int, inputs: int, bits: int = 4, sparse: bool = False) -> Stored:
    table, codes = (torch.randn(outputs, 1 << bits) * 0.05).half(), torch.randint(0, 1 << bits, (outputs, inputs))
    numbers = torch.stack([row[own] for row, own in zip(table.float(), codes, strict=True)])
    stored = {"qweight": pack_words(codes, bits).t(), "lookup_table": table}
    if sparse:
        outliers = torch.where(torch.rand(outputs, inputs) < 0.02, torch.randn(outputs, inputs) * 0.2, 0.0)
        rows = outliers.to_sparse_csr()
        stored |= {"rows": rows.crow_indices().int(), "cols": rows.col_indices().int(), "vals": rows.values()}
        whole, places = torch.randn(inputs, 2) * 0.05, torch.tensor([outputs - 1, 3])
        stored |= {"full_rows": whole, "full_row_indices": places.int(), "startrows": torch.zeros(4 * outputs).int()}
        numbers = numbers + outliers
        numbers[places] += whole.t()
    return stored, numbers


def write_squeezellm(folder: Path, model: str, bits: int = 4, sparse: bool = False) -> Checkpoints:
    said = {"quant_method": "squeezellm", "wbits": bits}
    return write_projections(folder, model, said, lambda *shape: draw(*shape, bits, sparse))


SAMPLES = {"squeezellm": Sample(lambda folder: write_squeezellm(folder, "llama"))}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize(("model", "bits", "sparse"), [("llama", 4, False), ("mixtral", 4, True), ("llama", 3, True)])
def test_squeezellm(tmp_path: Path, model: str, bits: int, sparse: bool) -> None:
    made = write_squeezellm(tmp_path, model, bits, sparse)
    lines = check_logits(made).model.table.describe_unused()
    assert any(line.startswith("dequantized at load: model.layers.0") for line in lines)
    if sparse:
        wrong = "model.layers.1.self_attn.o_proj.cols"
        change_tensors(made, lambda name, value: value + 60 if name == wrong else value)
        with pytest.raises(LoadError, match=f"{wrong}: the checkpoint has .*, expected 0 to 63"):
            start(made.packed)


def test_wrong_settings_are_refused() -> None:
    table = WeightTable(torch.float32, torch.device("meta"))
    with pytest.raises(ConfigError, match="wbits 2: 3 and 4 are read"):
        LinearLayers(table, {"quantization_config": {"quant_method": "squeezellm", "wbits": 2}})
