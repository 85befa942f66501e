"""Checkpoints of HQQ, in the layout of hqq/core/quantize.py and bitpack.py, against the numbers that they stand for."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoint import Checkpoints, check_logits, is_projection, logits, write
from safetensors.torch import load_file, save_file
from tiny_models import settings, start
from torch import Tensor

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.quantization.formats.hqq import HqqScheme
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.shared.errors import ConfigError, LoadError

MODELS = ("llama", "mixtral", "qwen3-moe", "deepseek-v3")
PACKED = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}  # integers of an element


def pack(codes: Tensor, bits: int) -> Tensor:
    """Row r is in bits of element r % step, the first rows in the upper bits; 3 bits in int32, else in uint8."""
    count = PACKED[bits]
    step = -(-len(codes) // count)
    packed = torch.zeros(step, codes.shape[1], dtype=torch.int64)
    for row, values in enumerate(codes):
        packed[row % step] |= values << bits * (count - 1 - row // step)
    return packed.to(torch.int32 if bits == 3 else torch.uint8)


def store(
    params: dict[str, Any], as_float: bool, only: str, name: str, weight: Tensor
) -> tuple[dict[str, Tensor], Tensor] | None:
    if not (is_projection(name) or name.endswith(".gate")) or only not in name:
        return None
    bits, group, axis = params["nbits"], params["group_size"], params["axis"]
    if group is None:
        codes = torch.randint(0, 1 << bits, weight.shape)
    else:
        size = (-1, group) if axis == 1 else (group, -1)
        codes = torch.randint(0, 1 << bits, (weight.numel(),)).view(size)
    shape = (len(codes), 1) if axis == 1 else (1, codes.shape[1])
    middle, most = (1 << bits) / 2, 1 << bits
    scale = (torch.rand(shape) + 0.5) * 0.3 / most
    zero = middle + (torch.rand(shape) - 0.5) * middle / 2
    packed = pack(codes, bits)
    tensors = {
        "W_q": packed.contiguous().view(torch.float16) if as_float else packed,
        "scale": scale,
        "zero": zero,
        "nbits": torch.tensor(bits, dtype=torch.int32),
        "axis": torch.tensor(axis, dtype=torch.int32),
        "shape": torch.tensor(weight.shape, dtype=torch.int32),
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        "view_as_float": torch.tensor(as_float, dtype=torch.uint8),
    }
    if group is not None:
        tensors["group_size"] = torch.tensor(group, dtype=torch.int32)
    return {f"{name}.{key}": value for key, value in tensors.items()}, ((codes - zero) * scale).view(weight.shape)


def write_hqq(
    folder: Path,
    model: str,
    bits: int = 4,
    group: int | None = 32,
    axis: int = 1,
    as_float: bool = False,
    only: str = "",
) -> Checkpoints:
    params = {"nbits": bits, "group_size": group, "axis": axis, "channel_wise": True, "optimize": True}
    config: dict[str, Any] = {"weight_quant_params": params, "scale_quant_params": None, "zero_quant_params": None}
    config = {only: config} if only else config
    said = {"quant_method": "hqq", "quant_config": config, "skip_modules": ["lm_head"]}
    files = {"config.json": {"quantization_config": said}}
    return write(folder, model, partial(store, params, as_float, only), files)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bits", [4, 8])
def test_logits(tmp_path: Path, model: str, bits: int) -> None:
    forms = {linear.method.form for linear in check_logits(write_hqq(tmp_path, model, bits)).model.linears()}
    assert f"W{bits}A16" in forms


@pytest.mark.parametrize(
    ("bits", "group", "axis"),
    [(4, 64, 1), (4, None, 1), (8, None, 1), (4, 64, 0), (8, 32, 0), (3, 32, 1), (2, 32, 1), (1, 32, 1), (3, 64, 0)],
)
def test_other_settings(tmp_path: Path, bits: int, group: int | None, axis: int) -> None:
    """A group of 64 goes on from a row of 96 to the next."""
    runner = check_logits(write_hqq(tmp_path, "mixtral", bits, group, axis))
    notes = "\n".join(runner.model.table.describe_unused())
    assert ("dequantized at load" in notes) == (axis == 0 or bits < 4)


def test_bytes_that_are_viewed_as_floats(tmp_path: Path) -> None:
    check_logits(write_hqq(tmp_path, "llama", as_float=True))


def test_settings_of_some_layers(tmp_path: Path) -> None:
    runner = check_logits(write_hqq(tmp_path, "llama", only="self_attn.q_proj"))
    assert {linear.method.form for linear in runner.model.linears()} == {"dense", None}


def test_the_fallback_to_transformers(tmp_path: Path) -> None:
    runner = check_logits(write_hqq(tmp_path, "llama"), model_impl="transformers")
    assert sum(linear.method.form == "W4A16" for linear in runner.model.linears()) > 3


@pytest.mark.parametrize("lacks", ["W_q", "scale", "zero"])
def test_what_lacks_is_named(tmp_path: Path, lacks: str) -> None:
    made = write_hqq(tmp_path, "llama")
    file, name = made.packed / "model.safetensors", f"model.layers.1.mlp.up_proj.{lacks}"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(LoadError, match=f"the checkpoint lacks {name}$"):
        start(made.packed)


@pytest.mark.parametrize(
    ("key", "changed", "error"),
    [
        ("nbits", torch.tensor(8), r"the checkpoint has 8, expected \[4\]"),
        ("group_size", torch.tensor(64), r"the checkpoint has 64, expected \[32\]"),
        ("zero", torch.full((192, 1), torch.inf), "the checkpoint has numbers that are not finite"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, key: str, changed: Tensor, error: str) -> None:
    made = write_hqq(tmp_path, "llama")
    file, name = made.packed / "model.safetensors", f"model.layers.1.mlp.up_proj.{key}"
    save_file(load_file(file) | {name: changed}, file)
    with pytest.raises(LoadError, match=f"{name}: {error}"):
        start(made.packed)


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"nbits": 5}, "nbits 5, axis 1, channel_wise True: not known"),
        ({"axis": 2}, "nbits 4, axis 2"),
        ({"group_size": 0}, "group_size 0: 1 or more"),
    ],
)
def test_settings_that_it_does_not_know(params: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        HqqScheme({"quant_config": {"weight_quant_params": params}}, torch.float32)


@pytest.mark.parametrize("bits", [4, 8])
def test_dummy_weights(tmp_path: Path, bits: int) -> None:
    made = write_hqq(tmp_path, "mixtral", bits)
    assert json.loads((made.packed / "config.json").read_text())["quantization_config"]["quant_method"] == "hqq"
    runner = engine.start(settings(made.packed, load_format="dummy"), lambda phase, progress, notes: None)
    assert torch.isfinite(logits(runner)).all()
    kept = [linear for linear in runner.model.linears() if isinstance(linear.method, KeptLinear)]
    assert len(kept) > 5
    for linear in kept:
        assert 0.015 < float(linear(torch.eye(linear.shape[0])).std()) < 0.025
