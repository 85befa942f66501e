"""Experts of a 16-bit checkpoint, rounded to int8 while they load."""

import json
from pathlib import Path

import pytest
import torch
from model_logits import all_logits
from quantized_checkpoint import IDS, Checkpoints, Sample, Stored, check_logits, write
from tiny_models import BY_NAME, start
from torch import Tensor

from blockyard.services.gpu_worker.runner import Runner

SAID = json.dumps({"quantization_config": {"quant_method": "experts_int8"}})


def write_experts(folder: Path, model: str = "mixtral") -> Checkpoints:
    """The quantized one is not quantized in the file."""

    def store(name: str, weight: Tensor) -> Stored | None:
        if ".experts." not in name:
            return None
        scale = weight.abs().amax(1, keepdim=True) / 127
        return {f"{name}.weight": weight}, torch.round(weight / scale) * scale

    return write(folder, model, store, {})


SAMPLES = {"experts_int8": Sample(write_experts, model="mixtral")}


@pytest.mark.parametrize("model", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_logits_are_those_of_rounded_experts(tmp_path: Path, model: str) -> None:
    assert_noted(check_logits(write_experts(tmp_path, model), packed_fields={"config_overrides": SAID}))


def test_stacked_experts_whatever_their_names(tmp_path: Path) -> None:
    BY_NAME["granite-moe"].save(tmp_path)
    runner, plain = (start(tmp_path, max_model_len=64, **more) for more in ({"config_overrides": SAID}, {}))
    got, want = (all_logits(one, IDS, [12]) for one in (runner, plain))
    assert 0 < float((got - want).std() / want.std()) < 0.03
    assert_noted(runner)


def assert_noted(runner: Runner) -> None:
    of_attention = [one.method for one in runner.model.linears() if one.method.form == "dense"]
    assert of_attention
    notes = runner.model.table.describe_unused()
    assert not [note for note in notes if "no weight of this model" in note]
    [of_experts] = [note for note in notes if "W8A16 weights, dequantized" in note]
    assert ".experts" in of_experts or ".block_sparse_moe" in of_experts


def test_a_model_without_experts_is_said_not_to_be_quantized(tmp_path: Path) -> None:
    BY_NAME["llama"].save(tmp_path)
    lines = start(tmp_path, max_model_len=64, config_overrides=SAID).model.table.describe_unused()
    assert lines == ["quantization that quantizes no weight of this model: experts_int8"]
