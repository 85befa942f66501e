"""Checkpoints of AWQ against the numbers that they stand for.

The packings are written here as AutoAWQ's do it (awq/modules/linear: gemm.py, gemv.py, and `pack_intweight` in
gemv_fast.py), code by code.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packed_words import in_marlin_order, pack_words
from quantized_checkpoint import Sample, check_logits, is_projection, logits, write
from safetensors.torch import load_file, save_file
from tiny_models import settings, start
from torch import Tensor

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.formats.awq import AwqScheme
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.shared.errors import ConfigError, LoadError

GROUP = 16
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of the outputs in a word of gemm, from its lowest bits on
Packing = Callable[[Tensor, Tensor, Tensor, int], dict[str, Tensor]]


def gemm(codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> dict[str, Tensor]:
    """codes [outputs, inputs], zeros and scales [outputs, groups]."""

    def packed(numbers: Tensor) -> Tensor:
        return pack_words(numbers.unflatten(1, (-1, 8))[..., ORDER].flatten(1), 4)

    return {"qweight": packed(codes.t()), "qzeros": packed(zeros.t()), "scales": scales.t()}


def zeros_width(inputs: int, group: int) -> int:
    """Words of zeros in a row of gemv."""
    multiplier = 1 if group >= 128 else {64: 2, 32: 4, 16: 8}[group]
    width = -(-(inputs // group) // 8)
    return -(-width // multiplier) * multiplier


def gemv(codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> dict[str, Tensor]:
    width = zeros_width(codes.shape[1], group)
    wide_zeros, wide_scales = torch.zeros(len(codes), width * 8).long(), torch.zeros(len(codes), width * 8).half()
    wide_zeros[:, : zeros.shape[1]], wide_scales[:, : zeros.shape[1]] = zeros, scales
    return {"qweight": pack_words(codes, 4), "qzeros": pack_words(wide_zeros, 4), "scales": wide_scales}


def gemv_fast(codes: Tensor, zeros: Tensor, scales: Tensor, group: int) -> dict[str, Tensor]:
    """Four rows of 64 inputs are packed together; in each run of 32 inputs, input i stands at `places[i]`."""
    outputs, inputs = codes.shape
    of_run = [i for b in range(4) for a in range(4) for i in (8 * a + 2 * b, 8 * a + 2 * b + 1)]
    of_eight = [8 * run + i for run in range(4) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
    ordered = codes.reshape(outputs, -1, 32)[..., of_run][..., of_eight].reshape(outputs, inputs)
    blocks = ordered.reshape(outputs // 4, 4, inputs // 64, 64).transpose(1, 2).reshape(outputs // 4, -1)
    wide = torch.zeros(zeros_width(inputs, group) * 8, outputs).half()
    wide_scales, wide_zeros = wide.clone(), wide.clone()
    wide_scales[: scales.shape[1]] = scales.t()
    wide_zeros[: scales.shape[1]] = -(scales.float() * zeros).half().t()
    return {"qweight": pack_words(blocks, 4, 16), "scales": wide_scales, "scaled_zeros": wide_zeros}


PACKINGS: dict[str, Packing] = {"gemm": gemm, "gemv": gemv, "gemv_fast": gemv_fast}


def draw(
    pack: Packing, outputs: int, inputs: int, group: int, zero: int | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix and its numbers. zero: of all; None: random ones."""
    groups = inputs // group
    codes = torch.randint(0, 16, (outputs, inputs))
    zeros = torch.randint(0, 16, (outputs, groups)) if zero is None else torch.full((outputs, groups), zero)
    scales = (torch.rand(outputs, groups) * 0.03 + 0.005).half()
    whole = (numbers.repeat_interleave(group, 1) for numbers in (zeros, scales.float()))
    return pack(codes, zeros, scales, group), (codes - next(whole)) * next(whole)


def write_awq(folder: Path, model: str, version: str = "gemm", group: int = GROUP, **more: Any) -> Any:
    """Matrices that do not fit the packing are left out, and named."""
    unit = 64 if version == "gemv_fast" else max(group, 8)

    def fits(weight: Tensor) -> bool:
        return weight.shape[1] % unit == 0 and weight.shape[0] % 8 == 0

    left_out: dict[str, None] = {}

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name):
            return None
        if not fits(weight):
            left_out[name] = None
            return None
        size = weight.shape[1] if group < 0 else group
        zero = None if more.get("zero_point", True) else 8
        stored, numbers = draw(PACKINGS[version], *weight.shape, size, zero)
        return {f"{name}.{key}": value for key, value in stored.items()}, numbers

    said: dict[str, Any] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": version,
    }
    made = write(folder, model, store, {"config.json": {}})
    change_config(made.packed, said | {"modules_to_not_convert": [*left_out, "gate"], **more})
    return made


def change_config(folder: Path, said: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))


SAMPLES = {"awq": Sample(lambda folder: write_awq(folder, "llama"))}


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
