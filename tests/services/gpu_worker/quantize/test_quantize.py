"""Checkpoints that `blockyard quantize` writes, read again by the package compressed-tensors and by the worker."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from packed_model import load_model, run_packed
from quantized_checkpoint import is_projection, logits
from safetensors.torch import load_file, save_file
from sentence_folders import save_sentence_folder
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny_models import BY_NAME, start
from torch import Tensor

from blockyard.services.gpu_worker.quantization.dense import UnquantizedLinear
from blockyard.services.gpu_worker.quantize.__main__ import table
from blockyard.services.gpu_worker.quantize.folder import quantize
from blockyard.services.gpu_worker.quantize.rounding import Rounding, config, round_matrix
from blockyard.shared.config.pooling.sentence_modules import read_modules
from blockyard.shared.errors import ConfigError

HOW = {
    "fp8": (Rounding("fp8"), 0.04),
    "fp8-block": (Rounding("fp8-block"), 0.04),
    "int8": (Rounding("int8"), 0.01),
    "w4": (Rounding("w4", 32), 0.12),
    "w4 with zeros": (Rounding("w4", 32, asymmetric=True), 0.11),
    "w4, some": (Rounding("w4", 16, ignore=["lm_head", "re:.*o_proj", "model.layers.1"]), 0.12),
}


def source(folder: Path, model: str) -> Path:
    BY_NAME[model].save(folder / "source")
    return folder / "source"


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def read_by_the_package(folder: Path) -> dict[str, Tensor]:
    """All weights as numbers."""
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    [own] = QuantizationConfig(**said).config_groups.values()
    compressor, stored = BaseCompressor.get_value_from_registry(own.format), tensors_of(folder)
    made = {}
    for name in [name.rpartition(".")[0] for name in stored if name.endswith(".weight_scale")]:
        state = {
            key.removeprefix(f"{name}."): stored.pop(key) for key in list(stored) if key.startswith(f"{name}.weight")
        }
        made[f"{name}.weight"] = compressor.decompress(state, own)["weight"].float()
    return stored | made


def assert_same_logits(target: Path, plain: Path) -> None:
    """Those of a quantized folder and of its numbers in 16 or 32 bits, with inputs that are rounded alike."""
    packed, dense = (start(folder, max_model_len=64) for folder in (target, plain))
    for linear, like in zip(dense.model.linears(), packed.model.linears(), strict=True):
        if not isinstance(like.method, UnquantizedLinear):
            rounding = like.method.kept_form.round_inputs
            linear.wrap(lambda product, rounding=rounding: lambda x: product(rounding(x, {})))
    torch.testing.assert_close(logits(packed), logits(dense), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("model", "kind"), [(model, kind) for kind in HOW for model in ("llama", "mixtral")])
def test_the_worker_and_the_package_read_the_same(tmp_path: Path, model: str, kind: str) -> None:
    how, most = HOW[kind]
    of_source, target = source(tmp_path, model), tmp_path / "target"
    written = quantize(of_source, target, how)
    numbers, before = read_by_the_package(target), tensors_of(of_source)
    assert numbers.keys() == before.keys()
    changed = {name for name, value in numbers.items() if not torch.equal(value, before[name].float())}
    assert changed == {
        f"{name.removesuffix('.weight')}.weight"
        for name in before
        if is_projection(name.removesuffix(".weight"))
        and not (how.ignore and ("o_proj" in name or "layers.1." in name))
    }
    for name in changed:
        error = (numbers[name] - before[name]).norm() / before[name].norm()
        assert 0 < float(error) < most
    assert all(
        0 < one.relative_error < most for key, one in written.layers.items() if key and "model.layers.1" not in key
    )
    sizes = sum(value.nbytes for value in tensors_of(target).values())
    assert written.size_bytes == sizes == sum(one.bytes_after for one in written.layers.values())
    assert table(written).splitlines()[-1].split() == [
        "all",
        f"{sum(value.nbytes for value in before.values()) / 1e6:.2f}",
        f"{sizes / 1e6:.2f}",
    ]
    plain = tmp_path / "plain"
    shutil.copytree(of_source, plain, ignore=lambda folder, names: [one for one in names if ".safetensors" in one])
    save_file({name: value.contiguous() for name, value in numbers.items()}, plain / "model.safetensors")
    assert_same_logits(target, plain)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_group_may_be_all_inputs(asymmetric: bool) -> None:
    how = Rounding("w4", 64, asymmetric)
    made, numbers = round_matrix(torch.randn(24, 64, generator=torch.Generator().manual_seed(2)), how)
    [own] = QuantizationConfig(**config(how, [])).config_groups.values()
    read = BaseCompressor.get_value_from_registry(own.format).decompress(dict(made), own)["weight"]
    torch.testing.assert_close(read, numbers, atol=0, rtol=1e-6)


STACKS = {"gpt-oss": ".mlp", "llama4": ".feed_forward", "gemma4-moe": ""}  # what is before "experts"


def restacked(model: str, before: dict[str, Tensor], numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The numbers of single experts in the stacks that transformers has. Raises KeyError if some are missing."""
    made = dict[str, Tensor]()
    for name, stack in before.items():
        prefix, _, last = name.rpartition(".")
        kind = "bias" if last.endswith("_bias") else "weight"
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(last.removesuffix("_bias"))
        if not prefix.endswith("experts") or parts is None:
            made[name] = numbers.pop(name)
            continue
        experts = []
        for i in range(len(stack)):
            own = [numbers.pop(f"{prefix}{'.experts' * (model == 'gpt-oss')}.{i}.{one}.{kind}") for one in parts]
            experts.append(torch.stack(own, 1).flatten(0, 1) if model == "gpt-oss" else torch.cat(own))
        whole = torch.stack(experts)
        made[name] = whole.mT if kind == "weight" and model != "gemma4-moe" else whole
    assert not numbers
    return made


@pytest.mark.parametrize("kind", ["fp8", "fp8-block", "int8", "w4"])
@pytest.mark.parametrize("model", STACKS)
def test_stacked_experts_are_cut_and_quantized(tmp_path: Path, model: str, kind: str) -> None:
    how = Rounding(kind, 16)
    of_source, target = source(tmp_path, model), tmp_path / "target"
    written = quantize(of_source, target, how)
    assert not written.stacks and not [name for name in written.ignored if "experts." in name]
    before, numbers = tensors_of(of_source), read_by_the_package(target)
    plain = tmp_path / "plain"
    shutil.copytree(of_source, plain, ignore=lambda folder, names: [one for one in names if ".safetensors" in one])
    same = restacked(model, before, numbers)
    stacks = [name for name in same if ".experts." in name and same[name].dim() == 3]
    assert stacks
    for name in stacks:
        error = (same[name] - before[name]).norm() / before[name].norm()
        assert 0 < float(error) < 0.15, name
    save_file({name: value.contiguous() for name, value in same.items()}, plain / "model.safetensors")
    assert_same_logits(target, plain)


def test_stacks_that_stay(tmp_path: Path) -> None:
    """Those to ignore, and those of which no public layout has quantized matrices: these are said with their bytes."""
    of_source = source(tmp_path, "gpt-oss")
    written = quantize(of_source, tmp_path / "target", Rounding("int8", ignore=["experts"]))
    assert {name.partition(".mlp.")[2] for name in written.ignored if ".mlp." in name} == {
        "router",
        "experts.gate_up_proj",
        "experts.down_proj",
    }
    lines = start(tmp_path / "target", max_model_len=64).model.table.describe_unused()
    assert not [line for line in lines if "quantization_config names" in line]
    quantize(of_source, tmp_path / "half", Rounding("int8", ignore=["re:.*experts.down_proj", "experts.3.up_proj"]))
    names = tensors_of(tmp_path / "half")
    assert names["model.layers.0.mlp.experts.experts.2.down_proj.weight"].dtype == torch.float32
    assert names["model.layers.0.mlp.experts.experts.3.up_proj.weight"].dtype == torch.float32
    assert names["model.layers.0.mlp.experts.experts.3.gate_proj.weight"].dtype == torch.int8
    BY_NAME["granite-moe"].save(tmp_path / "granite")
    written = quantize(tmp_path / "granite", tmp_path / "other", Rounding("int8"))
    assert table(written).splitlines()[-1] == (
        "stacked experts that stay as they are: 6 tensors, 1.33 MB (model.layers.0.block_sparse_moe.input_linear ...)"
    )


def with_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_layers_that_are_stored_as_inputs_by_outputs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"its layers are Conv1D.*--quantization fp8 quantizes them while they load"):
        quantize(source(tmp_path, "gpt2"), tmp_path / "target", Rounding("int8"))
    assert not (tmp_path / "target").exists()


def test_an_encoder_with_modules(tmp_path: Path) -> None:
    """Its layers have other names, and the folders of modules go along."""
    save_sentence_folder(tmp_path / "m", Pooling(32, "mean"), Dense(32, 20), Normalize())
    written = quantize(tmp_path / "m", tmp_path / "target", Rounding("int8"))
    errors = {name: one.relative_error for name, one in written.layers.items()}
    assert 0 < errors.pop("encoder.layer.0") < 0.01 and 0 < errors.pop("encoder.layer.1") < 0.01
    assert errors == {"": 0.0}
    before, after = read_modules(tmp_path / "m"), read_modules(tmp_path / "target")
    assert after == before is not None
    texts = [[5, 9, 17, 31], [40]]
    exact, rounded = (torch.cat(run_packed(load_model(tmp_path / one), texts)) for one in ("m", "target"))
    assert 0 < float((rounded - exact).norm() / exact.norm()) < 0.05


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    of_source, target = source(tmp_path, "llama"), tmp_path / "target"
    with pytest.raises(ConfigError, match=r"--group 48: model\.layers\.0\.\S+ has 64 inputs; --ignore it"):
        quantize(of_source, target, Rounding("w4", 48))
    with pytest.raises(ConfigError, match="source: no linear layer is left to quantize"):
        quantize(of_source, target, Rounding("int8", ignore=["model.layers"]))
    with pytest.raises(ConfigError, match="--ignore vision: no matrix of the model has that name"):
        quantize(of_source, target, Rounding("int8", ignore=["lm_head", "vision"]))
    assert not target.exists()
    target.mkdir()
    (target / "some").touch()
    with pytest.raises(ConfigError, match="target: the folder is not empty"):
        quantize(of_source, target, Rounding("int8"))
    fp8: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}
    for fields in (fp8, {"quantization_config": None, "text_config": fp8}):
        with_config(of_source, **fields)
        with pytest.raises(ConfigError, match="the checkpoint is quantized already"):
            quantize(of_source, tmp_path / "other", Rounding("int8"))
    with pytest.raises(ConfigError, match=r"no \.safetensors files"):
        (tmp_path / "empty").mkdir()
        (tmp_path / "empty" / "config.json").write_text("{}")
        quantize(tmp_path / "empty", tmp_path / "other", Rounding("int8"))
