"""Checkpoints of HQQ, in the layout of hqq/core/quantize.py and bitpack.py, against the numbers that they stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hqq_files import write_hqq
from quantized_checkpoint import check_dummy_weights, check_lack, check_logits, replace_tensors
from safetensors.torch import load_file
from tiny_models import start
from torch import Tensor

from blockyard.services.gpu_worker.quantization.formats.hqq import HqqScheme
from blockyard.shared.errors import ConfigError, LoadError

MODELS = ("llama", "mixtral", "qwen3-moe", "deepseek-v3")


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


@pytest.mark.parametrize("lacks", ["W_q", "scale", "zero"])
def test_what_lacks_is_named(tmp_path: Path, lacks: str) -> None:
    made = write_hqq(tmp_path, "llama")
    check_lack(made, f"model.layers.1.mlp.up_proj.{lacks}")


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
    name = f"model.layers.1.mlp.up_proj.{key}"
    replace_tensors(made, {name: changed})
    with pytest.raises(LoadError, match=f"{name}: {error}"):
        start(made.packed)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_codes_as_numbers_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """A float stands for several bytes of codes."""
    made, name = write_hqq(tmp_path, "llama"), "model.layers.1.mlp.up_proj.W_q"
    replace_tensors(made, {name: load_file(made.packed / "model.safetensors")[name].to(dtype)})
    with pytest.raises(LoadError, match=rf"{name}: the checkpoint has \[96, 32\], config.json means"):
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
    check_dummy_weights(write_hqq(tmp_path, "mixtral", bits).packed)
