"""Checkpoints of bitsandbytes, made by the package itself, against what it dequantizes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bitsandbytes import functional
from quantized_checkpoint import (
    Checkpoints,
    Sample,
    check_dummy_weights,
    check_lack,
    check_logits,
    is_projection,
    logits,
    write,
)
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, start
from torch import Tensor

from blockyard.services.gpu_worker.quantization.formats import bitsandbytes
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import NF4, Table4A16
from blockyard.services.launcher.models import model_files
from blockyard.shared.config import parsed_flags
from blockyard.shared.config.checkpoint import quantized_overrides
from blockyard.shared.config.parsed_flags import Values
from blockyard.shared.errors import ConfigError, LoadError
from blockyard.shared.quantization.table import NAMES

Stored = tuple[dict[str, Tensor], Tensor]


def quantize(kind: str, is_nested: bool, storage: torch.dtype, weight: Tensor, blocksize: int = 64) -> Stored:
    """The tensors of a matrix by the last parts of their names, and the package's numbers.

    The package is given one block a row, because its product of the CPU takes blocks to begin anew at each row.
    """
    packed, state = functional.quantize_4bit(
        weight.reshape(-1, blocksize),
        blocksize=blocksize,
        compress_statistics=is_nested,
        quant_type=kind,
        quant_storage=storage,
    )
    numbers = functional.dequantize_4bit(packed, state).float().view(weight.shape)
    state.shape = weight.shape
    return {"weight": packed} | {f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}, numbers


def quantize_8_bits(weight: Tensor) -> Stored:
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    order = torch.tensor(0, dtype=torch.uint8)
    return {"weight": codes, "SCB": scales, "weight_format": order}, codes.float() * scales[:, None] / 127


def store(how: partial[Stored], routers: bool, name: str, weight: Tensor) -> Stored | None:
    if not is_projection(name) and not (routers and name.endswith(".gate")):
        return None
    tensors, numbers = how(weight)
    return {f"{name}.{key}": value for key, value in tensors.items()}, numbers


def config_of(kind: str, **fields: Any) -> dict[str, Any]:
    bits = {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": kind}
    return {"quantization_config": {"quant_method": "bitsandbytes", **bits, **fields}}


def write_bnb(
    folder: Path, model: str, kind: str, nested: bool = False, routers: bool = False, **how: Any
) -> Checkpoints:
    storage = how.pop("storage", "uint8")
    make: Any = partial(quantize, kind, nested, getattr(torch, storage), **how)
    make = quantize_8_bits if kind == "int8" else make
    said = config_of(kind, bnb_4bit_use_double_quant=nested, bnb_4bit_quant_storage=storage)
    return write(folder, model, partial(store, make, routers), {"config.json": said})


MODELS = ("llama", "mixtral", "qwen3-moe", "deepseek-v3")


SAMPLES = {"bitsandbytes": Sample(lambda folder: write_bnb(folder, "llama", "nf4"))}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("kind", "nested"), [("nf4", True), ("fp4", False), ("int8", False)])
def test_logits(tmp_path: Path, model: str, kind: str, nested: bool) -> None:
    runner = check_logits(write_bnb(tmp_path, model, kind, nested))
    forms = {linear.method.form for linear in runner.model.linears()}
    assert forms - {None} == {"dense", "W8A16" if kind == "int8" else "Table4A16"}, "None: a router in float32"


@pytest.mark.parametrize(
    "how", [{"nested": True, "storage": "bfloat16"}, {"blocksize": 128}, {"blocksize": 32}, {"routers": True}]
)
def test_other_files(tmp_path: Path, how: dict[str, Any]) -> None:
    check_logits(write_bnb(tmp_path, "mixtral", "nf4", **how))


def test_rows_that_blocks_do_not_fit(tmp_path: Path) -> None:
    """A row of 72 inputs ends within a block: groups have 8, and weights become numbers."""
    weight = torch.randn(32, 72)
    tensors, numbers = quantize("nf4", True, torch.uint8, weight)
    scheme = bitsandbytes.BitsAndBytesScheme(config_of("nf4")["quantization_config"], torch.float32)
    for inputs, form in ((72, "dense"), (96, "Table4A16")):
        matrix = bitsandbytes.Matrix(name="a", outputs=32 * 72 // inputs, inputs=inputs)
        stored = scheme.stored(matrix)
        assert stored is not None
        assert stored.form.name == form
        state = json.loads(bytes(tensors["weight.quant_state.bitsandbytes__nf4"].tolist()))
        state = torch.tensor(list(json.dumps(state | {"shape": [matrix.outputs, inputs]}).encode()), dtype=torch.uint8)
        given = {
            key: tensors["weight" if key == "weight" else f"weight.{key}"]
            for key in stored.tensors
            if key != "quant_state"
        }
        kept = stored.to_kept(given | {"quant_state": state})
        got = stored.form.dequantize(kept, inputs, torch.float32)
        torch.testing.assert_close(got, numbers.view(matrix.outputs, inputs))


@pytest.mark.parametrize("said", [{"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}])
def test_settings_that_users_of_transformers_paste(tmp_path: Path, said: dict[str, bool | str]) -> None:
    BY_NAME["llama"].save(tmp_path)
    given = ["--model", str(tmp_path), "--hf-overrides", json.dumps({"quantization_config": said})]
    values = Values(parsed_flags.from_command_line(given)[0])
    overrides = json.dumps(quantized_overrides(values, model_files.find(values)))
    runner = start(tmp_path, max_model_len=64, config_overrides=overrides)
    kept = [one.method.kept_form.name for one in runner.model.linears() if isinstance(one.method, KeptLinear)]
    assert kept == ["W8A16" if "load_in_8bit" in said else "Table4A16"] * 12


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_rounding_is_the_packages(kind: str) -> None:
    weight = torch.randn(64, 128)
    scheme = bitsandbytes.BitsAndBytesScheme(config_of(kind, from_16_bits=True)["quantization_config"], torch.float32)
    stored = scheme.stored(bitsandbytes.Matrix(name="a", outputs=64, inputs=128))
    assert stored is not None
    got = stored.form.dequantize(stored.to_kept({"weight": weight}), 128, torch.float32)
    torch.testing.assert_close(got, quantize(kind, False, torch.uint8, weight)[1])


@pytest.mark.parametrize("model", ["llama", "mixtral", "deepseek-v3"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_16_bit_checkpoint_is_quantized_while_it_loads(tmp_path: Path, model: str, kind: str) -> None:
    """As the package would have, in blocks that begin anew at each row."""
    BY_NAME[model].save(tmp_path / "16")
    said = dict(NAMES["bitsandbytes"].of_16_bits or {})
    said = said if kind == "nf4" else config_of(kind, from_16_bits=True)["quantization_config"]
    runner = start(tmp_path / "16", max_model_len=64, config_overrides=json.dumps({"quantization_config": said}))

    def rounded(name: str, weight: Tensor) -> Stored | None:
        if not is_projection(name) or name.endswith("kv_b_proj"):
            return None
        if kind == "int8":
            scale = weight.abs().amax(1, keepdim=True) / 127
            return {}, (weight / scale).round() * scale
        padded = F.pad(weight, (0, -weight.shape[1] % 64))
        return {}, quantize("nf4", False, torch.uint8, padded)[1][:, : weight.shape[1]]

    plain = start(write(tmp_path, model, rounded, {}).plain, max_model_len=64)
    torch.testing.assert_close(logits(runner), logits(plain), atol=1e-4, rtol=1e-4)
    assert sum(isinstance(one.method, KeptLinear) for one in runner.model.linears()) > 5


@pytest.mark.parametrize(
    ("kind", "lacks"),
    [("nf4", "weight.absmax"), ("nf4", "weight.quant_map"), ("nf4", "weight.nested_absmax"), ("int8", "SCB")],
)
def test_what_lacks_is_named(tmp_path: Path, kind: str, lacks: str) -> None:
    made = write_bnb(tmp_path, "llama", kind, nested=True)
    check_lack(made, f"model.layers.1.self_attn.k_proj.{lacks}")


@pytest.mark.parametrize(
    ("name", "changed", "error"),
    [
        ("weight.quant_map", torch.linspace(-1, 1, 16), "quant_map: the checkpoint has another table than nf4"),
        ("weight.absmax", torch.full((32,), torch.nan), "absmax: the checkpoint has a scale of nan"),
        ("weight.absmax", torch.ones(7), r"absmax: the checkpoint has \[7\], config.json means \[32\]"),
        ("weight.quant_state.bitsandbytes__nf4", torch.zeros(3, dtype=torch.uint8), "quant_state: JSON is malformed"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, changed: Tensor, error: str) -> None:
    made = write_bnb(tmp_path, "llama", "nf4")
    file = made.packed / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"model.layers.1.self_attn.k_proj.{name}": changed}, file)
    with pytest.raises(LoadError, match=rf"k_proj\.weight\.{error}"):
        start(made.packed)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_4bit and load_in_8bit are both true"),
        ({"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type 'int4' is none of nf4, fp4"),
        ({"bnb_4bit_quant_storage": "int64"}, "bnb_4bit_quant_storage 'int64' is none of uint8"),
    ],
)
def test_settings_that_it_does_not_know(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        bitsandbytes.BitsAndBytesScheme(fields, torch.float32)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_dummy_weights(tmp_path: Path, kind: str) -> None:
    check_dummy_weights(write_bnb(tmp_path, "mixtral", kind).packed)


def test_table() -> None:
    torch.testing.assert_close(torch.tensor(NF4), functional.get_4bit_type("nf4", device="cpu"))
    want = functional.get_4bit_type("fp4", device="cpu")
    torch.testing.assert_close(torch.tensor(bitsandbytes.FP4), want)
    assert Table4A16(NF4, 64) == Table4A16(tuple(NF4), 64)
