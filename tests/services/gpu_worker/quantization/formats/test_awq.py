"""Checkpoints of AWQ against the numbers that they stand for.

The packings are written here as AutoAWQ's do it (awq/modules/linear: gemm.py, gemv.py, and `pack_intweight` in
gemv_fast.py), code by code.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from awq_files import GROUP, PACKINGS, draw, write_awq
from packed_words import in_marlin_order
from quantized_checkpoint import check_logits, logits
from safetensors.torch import load_file, save_file
from tiny_models import settings, start

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.formats.awq import AwqScheme
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.shared.errors import ConfigError, LoadError


@pytest.mark.parametrize("model", ["llama", "mixtral", "qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize("version", PACKINGS)
def test_logits(tmp_path: Path, model: str, version: str) -> None:
    runner = check_logits(write_awq(tmp_path, model, version))
    assert sum(linear.method.form == "W4A16" for linear in runner.model.linears()) >= 9


@pytest.mark.parametrize("fields", [{"group": -1}, {"zero_point": False}, {"bits": None, "w_bit": 4}])
def test_settings(tmp_path: Path, fields: dict[str, Any]) -> None:
    check_logits(write_awq(tmp_path, "llama", **fields))


@pytest.mark.parametrize("version", PACKINGS)
@pytest.mark.parametrize("group", [32, 64, -1])
def test_padded_groups(version: str, group: int) -> None:
    inputs, said = 384, {"quant_method": "awq", "version": version.upper(), "group_size": group}
    stored, numbers = draw(PACKINGS[version], 16, inputs, inputs if group < 0 else group)
    table = WeightTable(torch.float32, torch.device("cpu"))
    linear = LinearLayers(table, {"quantization_config": said}).make([part("h.0.a", 16)], inputs)
    for name, value in stored.items():
        table.put(f"h.0.a.{name}", value)
    table.check_complete()
    assert isinstance(linear.method, KeptLinear)
    assert torch.equal(linear.method.dequantized(), numbers)


def test_the_order_of_marlin() -> None:
    codes, scales = torch.randint(0, 16, (64, 64)), torch.rand(2, 64).half()
    words, ordered = in_marlin_order(codes, scales)
    said = {"quant_method": "awq", "version": "marlin", "group_size": 32, "zero_point": False}
    table = WeightTable(torch.float32, torch.device("cpu"))
    linear = LinearLayers(table, {"quantization_config": said}).make([part("h.0.a", 64)], 64)
    table.put("h.0.a.qweight", words)
    table.put("h.0.a.scales", ordered)
    assert isinstance(linear.method, KeptLinear)
    want = ((codes - 8) * scales.float().repeat_interleave(32, 0)).t()
    torch.testing.assert_close(linear.method.dequantized(), want)


def test_dummy_weights(tmp_path: Path) -> None:
    made = write_awq(tmp_path, "mixtral")
    runner = engine.start(settings(made.packed, load_format="dummy"), lambda phase, progress, notes: None)
    assert torch.isfinite(logits(runner)).all()


@pytest.mark.parametrize(
    ("version", "suffix", "error"),
    [
        ("gemm", "qzeros", "a symmetric matrix has zeros of 8 to 9, expected 8"),
        ("gemv_fast", "scaled_zeros", "the checkpoint has numbers that are no multiples of scales"),
    ],
)
def test_wrong_zeros_are_named(tmp_path: Path, version: str, suffix: str, error: str) -> None:
    made = write_awq(tmp_path, "llama", version, zero_point=version != "gemm")
    file = made.packed / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if name.endswith(suffix))
    tensors[name] = tensors[name].clone()
    tensors[name][0, 0] = tensors[name][0, 0] + 1
    save_file(tensors, file)
    with pytest.raises(LoadError, match=rf"{name}: {error}"):
        start(made.packed)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"bits": 8}, "bits 8: weights of AWQ have 4"),
        ({"w_bit": 5}, "bits 5: weights of AWQ have 4"),
        ({"q_group_size": 0}, "group_size 0: it is -1 or at least 1"),
        ({"version": "llm-awq"}, "version 'llm-awq' is none of gemm, gemv, gemv_fast, marlin"),
    ],
)
def test_wrong_settings_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        AwqScheme({"quant_method": "awq", **fields}, torch.float32)


@pytest.mark.parametrize(
    ("outputs", "inputs", "version", "error"),
    [
        (8, 72, "gemm", "h.0.a has 72 inputs; a multiple of 16 is needed"),
        (12, 64, "gemm", "h.0.a has 12 outputs; a multiple of 8 is needed"),
        (8, 80, "gemv_fast", "h.0.a has 80 inputs; a multiple of 64 is needed"),
    ],
)
def test_sizes_that_do_not_fit_are_named(outputs: int, inputs: int, version: str, error: str) -> None:
    said = {"quant_method": "awq", "version": version, "group_size": GROUP}
    layers = LinearLayers(WeightTable(torch.float32, torch.device("meta")), {"quantization_config": said})
    with pytest.raises(ConfigError, match=error):
        layers.make([part("h.0.a", outputs)], inputs)
