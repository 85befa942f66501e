"""Checkpoints of ModelOpt, in the layout that it documents, against the numbers that they stand for.

Layout of nvfp4: modelopt/torch/export/quant_utils.py and quantization/qtensor/nvfp4_tensor.py of NVIDIA's
Model-Optimizer; of hf_quant_config.json: "Unified HuggingFace checkpoint" in its documentation.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from modelopt_files import (
    add_settings,
    of_file,
    round_statically,
    store,
    write_modelopt,
)
from quantized_checkpoint import Checkpoints, Sample, check_lack, check_logits, replace_tensors, write
from safetensors.torch import load_file, save_file
from tiny_models import start

from blockyard.services.gpu_worker.kv.scales import place_scales
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.quantization.formats import modelopt
from blockyard.shared.errors import ConfigError, LoadError
from blockyard.shared.quantization.files import read_quantization
from blockyard.shared.quantization.method import has_fp8_kv

MODELS = ("llama", "mixtral", "qwen3-moe", "deepseek-v3")


def check(made: Checkpoints, rounds_inputs: bool = False, **fields: Any) -> Any:
    said = json.dumps({"quantization_config": read_quantization(made.packed, {}).said})
    add_settings(made, said)
    return check_logits(made, round_statically if rounds_inputs else None, **fields)


SAMPLES = {
    "modelopt": Sample(lambda folder: write_modelopt(folder, "llama", {"": "NVFP4"}, exclude_modules=["lm_head"]))
}


def test_files_with_scales_of_the_kv_cache_alone(tmp_path: Path) -> None:
    """As ModelOpt writes them with --kv_cache_qformat fp8 and no other format."""
    made = write(tmp_path, "llama", lambda name, weight: None, {})
    inner = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (made.packed / "hf_quant_config.json").write_text(json.dumps(of_file(inner)))
    runner = check(made)
    assert {linear.method.form for linear in runner.model.linears()} == {"dense"}
    assert has_fp8_kv(read_quantization(made.packed, {}).said)
    assert has_fp8_kv({"quant_method": "modelopt", "quantization": inner})


@pytest.mark.parametrize("model", MODELS)
def test_nvfp4(tmp_path: Path, model: str) -> None:
    uneven = ["q_b_proj", "kv_b_proj", "o_proj"] if model == "deepseek-v3" else []  # no whole groups
    algorithms = dict.fromkeys(uneven, "") | {"": "NVFP4"}
    left_out = ["lm_head", *(f"*.{name}" for name in uneven)]
    runner = check(write_modelopt(tmp_path, model, algorithms, group_size=16, exclude_modules=left_out))
    assert "Table4A16" in {linear.method.form for linear in runner.model.linears()}
    notes = runner.model.table.describe_unused()
    assert any(line.startswith(f"{modelopt.NOTE}: model.layers.0") for line in notes)


@pytest.mark.parametrize("model", ["llama", "mixtral", "deepseek-v3"])
def test_fp8(tmp_path: Path, model: str) -> None:
    check(write_modelopt(tmp_path, model, {"": "FP8"}), rounds_inputs=True)


@pytest.mark.parametrize("model", ["llama", "mixtral", "deepseek-v3"])
def test_blocks_of_weights_alone(tmp_path: Path, model: str) -> None:
    check(write_modelopt(tmp_path, model, {"": "FP8_PB_WO"}))


def test_scales_of_the_kv_cache_are_not_those_of_weights(tmp_path: Path) -> None:
    made = write_modelopt(tmp_path, "llama", {"": "NVFP4"}, kv_cache_quant_algo="FP8")
    file = made.packed / "model.safetensors"
    scales = {
        f"model.layers.{i}.self_attn.{name}_proj.{name}_scale": torch.tensor(0.5) for i in range(3) for name in "kv"
    }
    save_file(load_file(file) | scales, file)
    runner = check(made)
    [line] = [one for one in runner.model.table.describe_unused() if one.startswith("not used: ")]
    assert "k_proj.k_scale" in line
    table = WeightTable(torch.float32, torch.device("cpu"))
    placed = place_scales(table, 3, is_wanted=True)
    for name, value in scales.items():
        table.put(name, value)
    assert placed.tolist() == [[0.5, 0.5]] * 3


def test_globs_of_what_is_left_out(tmp_path: Path) -> None:
    algorithms = {"layers.1.self_attn": "", "layers.2.mlp": "", "": "NVFP4"}
    left_out = ["lm_head", "model.layers.1.self_attn*", "model.layers.*.mlp.router", "*layers.2.mlp.*"]
    runner = check(write_modelopt(tmp_path, "llama", algorithms, exclude_modules=left_out))
    notes = runner.model.table.describe_unused()
    assert "quantization_config names what the model does not have: model.layers.*.mlp.router" in notes


def test_algorithms_of_single_matrices(tmp_path: Path) -> None:
    algorithms = {"layers.1.self_attn": "", "self_attn": "FP8_PB_WO", "": "NVFP4"}
    made = write(tmp_path, "mixtral", partial(store, algorithms), {})
    names = {
        name.rpartition(".")[0] for name in load_file(made.packed / "model.safetensors") if name.endswith("_scale")
    }
    by_name = {
        name: {"quant_algo": "FP8_PB_WO"} if "self_attn" in name else {"quant_algo": "NVFP4", "group_size": 16}
        for name in names
        if ".experts." not in name
    } | {f"model.layers.{i}.block_sparse_moe.experts": {"quant_algo": "NVFP4"} for i in range(3)}
    inner = {"quant_algo": "MIXED_PRECISION", "quantized_layers": by_name}
    (made.packed / "hf_quant_config.json").write_text(json.dumps(of_file(inner)))
    check(made)


def test_settings_in_config_json_may_be_as_in_the_other_file(tmp_path: Path) -> None:
    made = write_modelopt(tmp_path, "llama", {"": "NVFP4"})
    add_settings(
        made, json.dumps({"quantization_config": {"quant_method": "modelopt"} | of_file({"quant_algo": "nvfp4"})})
    )
    check_logits(made)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"quant_algo": "W4A16_AWQ"}, "quant_algo 'W4A16_AWQ' is none of FP8, "),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size 32: NVFP4 has groups of 16"),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT8"}}}, "'INT8' is none of FP8"),
    ],
)
def test_settings_that_it_does_not_know(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        modelopt.ModelOptScheme(fields, torch.device("cpu"))


@pytest.mark.parametrize("model", ["llama", "mixtral"])
@pytest.mark.parametrize("lacks", ["weight", "weight_scale", "weight_scale_2"])
def test_what_lacks_is_named(tmp_path: Path, model: str, lacks: str) -> None:
    made = write_modelopt(tmp_path, model, {"": "NVFP4"})
    add_settings(made, json.dumps({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}))
    layer = "mlp.up_proj" if model == "llama" else "block_sparse_moe.experts.3.w3"
    check_lack(made, f"model.layers.1.{layer}.{lacks}")


def test_scales_that_are_no_numbers(tmp_path: Path) -> None:
    made = write_modelopt(tmp_path, "llama", {"": "NVFP4"})
    add_settings(made, json.dumps({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}))
    name = "model.layers.1.mlp.up_proj.weight_scale_2"
    replace_tensors(made, {name: torch.tensor(torch.inf)})
    with pytest.raises(LoadError, match=f"{name}: the checkpoint has a scale of inf"):
        start(made.packed)
