"""Scales keep the dtype that the file has, whatever the dtype of the model; wrong ones are named."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from quantized_checkpoint import Checkpoints, change_tensors, is_projection, kept_tensors, write
from safetensors.torch import load_file
from tiny_models import start
from torch import Tensor

from blockyard.services.gpu_worker.layers.linear import LinearLayers
from blockyard.services.gpu_worker.loading.checkpoint import read_headers
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.loading.tensor_headers import TensorHeader
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.kept import form
from blockyard.shared.errors import LoadError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUP = 32


def words(rows: int, columns: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, (rows, columns)).int()


def gptq(outputs: int, inputs: int, scales: Tensor) -> dict[str, Tensor]:
    own = {"qweight": words(inputs // 8, outputs), "qzeros": words(inputs // GROUP, outputs // 8)}
    return own | {"scales": scales.t()}


def awq(outputs: int, inputs: int, scales: Tensor) -> dict[str, Tensor]:
    own = {"qweight": words(inputs, outputs // 8), "qzeros": words(inputs // GROUP, outputs // 8)}
    return own | {"scales": scales.t()}


def hqq(outputs: int, inputs: int, scales: Tensor) -> dict[str, Tensor]:
    codes = torch.randint(0, 256, (outputs * inputs // GROUP // 2, GROUP), dtype=torch.uint8)
    return {"W_q": codes, "scale": scales.reshape(-1, 1), "zero": scales.reshape(-1, 1) * 400}


def packed(outputs: int, inputs: int, scales: Tensor) -> dict[str, Tensor]:
    return {"weight_packed": words(outputs, inputs // 8), "weight_scale": scales}


ARGS = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
CONFIGS = {
    gptq: {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False},
    awq: {"quant_method": "awq", "bits": 4, "group_size": GROUP},
    hqq: {
        "quant_method": "hqq",
        "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": GROUP}},
        "skip_modules": ["lm_head"],
    },
    packed: {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": ARGS}},
        "ignore": ["lm_head"],
    },
}
Layout = Callable[[int, int, Tensor], dict[str, Tensor]]


def write_random(folder: Path, layout: Layout, dtypes: tuple[torch.dtype, ...]) -> Checkpoints:
    """dtypes: of the scales of successive matrices."""
    count = 0

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        nonlocal count
        if not is_projection(name):
            return None
        (outputs, inputs), count = weight.shape, count + 1
        scales = (torch.rand(outputs, inputs // GROUP) * 0.02 + 0.001).to(dtypes[count % len(dtypes)])
        return {f"{name}.{key}": value for key, value in layout(outputs, inputs, scales).items()}, weight

    return write(folder, "llama", store, {"config.json": {"quantization_config": CONFIGS[layout]}})


def numbers_of(tensors: list[Tensor]) -> Tensor:
    return torch.cat([one.double().flatten() for one in tensors]).sort().values


@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("dtypes", [(one,) for one in DTYPES] + [DTYPES])
def test_scales_are_not_rounded(
    tmp_path: Path, layout: Layout, dtypes: tuple[torch.dtype, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "is_dequantized_on", lambda device, kept: False)
    monkeypatch.setattr(form, "fits_host", lambda kept, shape, dtype: False)
    made = write_random(tmp_path, layout, dtypes)
    for dtype in ("float16", "bfloat16"):
        runner = start(made.packed, dtype=dtype)
        kept = kept_tensors(runner, "scales")
        assert {one.dtype for one in kept} == set(dtypes)
        stored = load_file(made.packed / "model.safetensors")
        own = [value for name, value in stored.items() if name.endswith((".scales", ".scale", ".weight_scale"))]
        assert torch.equal(numbers_of(kept), numbers_of(own))
    if layout is hqq:
        zeros = [value for name, value in stored.items() if name.endswith(".zero")]
        assert torch.equal(numbers_of(kept_tensors(runner, "zeros")), numbers_of(zeros))


def test_headers_of_torch_files(tmp_path: Path) -> None:
    tensors = {"model.layers.0.a.scales": torch.ones(2, 3).bfloat16(), "lm_head.weight": torch.ones(4)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    headers = read_headers(tmp_path, "auto", [])
    assert headers.find("language_model.model.layers.0.a.scales") == TensorHeader((2, 3), torch.bfloat16)
    assert headers.find("lm_head.weight") == TensorHeader((4,), torch.float32)
    assert headers.find("layers.0.a.zeros") is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"none")
    assert read_headers(tmp_path, "auto", []).find("lm_head.weight") is None
    assert read_headers(tmp_path, "dummy", []).find("lm_head.weight") is None


def exponents(outputs: int, inputs: int, key: str) -> dict[str, Tensor]:
    codes = {"weight_packed": torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)}
    if key == "weight":
        codes = {"weight": torch.randn(outputs, inputs).to(torch.float8_e4m3fn)}
    return codes | {"weight_scale": torch.full((outputs, inputs // 32), 120, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("format_", "bits", "key"), [("mxfp4-pack-quantized", 4, "weight_packed"), ("mxfp8-quantized", 8, "weight")]
)
def test_an_exponent_that_is_no_number_is_named(tmp_path: Path, format_: str, bits: int, key: str) -> None:
    args = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32}
    said = {"quant_method": "compressed-tensors", "format": format_, "ignore": ["lm_head"]}
    said |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}}

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name):
            return None
        own = exponents(*weight.shape, key)
        return {f"{name}.{key}": value for key, value in own.items()}, weight

    made = write(tmp_path, "llama", store, {"config.json": {"quantization_config": said}})
    start(made.packed)
    wrong = "model.layers.1.mlp.down_proj.weight_scale"

    def change(name: str, value: Tensor) -> Tensor:
        if name == wrong:
            value[3, 1] = 255
        return value

    change_tensors(made, change)
    with pytest.raises(LoadError, match=f"{wrong}: the checkpoint has a scale of nan"):
        start(made.packed)


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_static_scales_of_inputs_are_not_all_0(tmp_path: Path, model: str) -> None:
    """Of a product the largest counts: an expert that calibration has not reached may have 0."""

    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if not is_projection(name):
            return None
        own = {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.ones(()), "input_scale": torch.ones(())}
        return {f"{name}.{key}": value for key, value in own.items()}, weight

    said = {"quant_method": "fp8", "activation_scheme": "static"}
    made = write(tmp_path, model, store, {"config.json": {"quantization_config": said}})
    one, all_of = ("k_proj", "o_proj") if model == "llama" else ("experts.1.w1", ".w2")
    change_tensors(made, lambda name, value: value * 0 if name.endswith(f"{one}.input_scale") else value)
    start(made.packed)
    change_tensors(made, lambda name, value: value * 0 if name.endswith(f"{all_of}.input_scale") else value)
    with pytest.raises(LoadError, match=f"{all_of}.input_scale: the checkpoint has a scale of 0, by which inputs are"):
        start(made.packed)
    start(made.packed, load_format="dummy")


@pytest.mark.parametrize("scale", [0.0, 0.5])
def test_static_ranges_of_inputs_are_not_all_0(scale: float) -> None:
    inputs = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor"}
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    said = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"a": group}}
    table = WeightTable(torch.float32, torch.device("cpu"))
    LinearLayers(table, {"quantization_config": said}).make([part("h.0.a", 8), part("h.0.b", 8)], 16)
    for name, own in (("a", 0.0), ("b", scale)):
        table.put(f"h.0.{name}.weight", torch.ones(8, 16, dtype=torch.int8))
        table.put(f"h.0.{name}.weight_scale", torch.ones(8, 1))
        table.put(f"h.0.{name}.input_scale", torch.tensor([own]))
        table.put(f"h.0.{name}.input_zero_point", torch.tensor([3], dtype=torch.int8))
    table.check_complete()
    with nullcontext() if scale else pytest.raises(LoadError, match=r"h\.0\.b\.input_scale: .* a scale of 0"):
        table.finish()
