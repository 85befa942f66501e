"""Checkpoints of HQQ, in the layout of hqq/core/quantize.py and bitpack.py, against the numbers that they stand for."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quantized_checkpoint import (
    Checkpoints,
    Sample,
    check_dummy_weights,
    check_lack,
    check_logits,
    is_projection,
    replace_tensors,
    write,
)
from safetensors.torch import load_file
from tiny_models import start
from torch import Tensor

from blockyard.services.gpu_worker.quantization.formats.hqq import HqqScheme
from blockyard.shared.errors import ConfigError, LoadError

PACKED = {1: 8, 2: 4, 3: 10, 4: 2, 8: 1}  # integers of an element


def pack(codes: Tensor, bits: int) -> Tensor:
    """Row r is in bits of element r % step, the first rows in the upper bits; 3 bits in int32, else in uint8."""
    count = PACKED[bits]
    step = -(-len(codes) // count)
    parts = F.pad(codes, (0, 0, 0, count * step - len(codes))).view(count, step, -1)
    packed = sum(one << bits * (count - 1 - i) for i, one in enumerate(parts))
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


MODELS = ("llama", "mixtral", "qwen3-moe", "deepseek-v3")


SAMPLES = {"hqq": Sample(lambda folder: write_hqq(folder, "llama"))}


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
