"""Experts of a 16-bit checkpoint, rounded to int8 while they load."""

import json
from pathlib import Path

import pytest
import torch
from model_logits import all_logits
from quantized_checkpoint import IDS, write
from tiny_models import BY_NAME, start
from torch import Tensor

from blockyard.services.gpu_worker.runner import Runner


@pytest.mark.parametrize("model", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_logits_are_those_of_rounded_experts(tmp_path: Path, model: str) -> None:
    def store(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if ".experts." not in name:
            return None
        scale = weight.abs().amax(1, keepdim=True) / 127
        return {f"{name}.weight": weight}, torch.round(weight / scale) * scale

    made = write(tmp_path, model, store, {})
    said = json.dumps({"quantization_config": {"quant_method": "experts_int8"}})
    runner = start(made.packed, max_model_len=64, config_overrides=said)
    plain = start(made.plain, max_model_len=64)
    torch.testing.assert_close(all_logits(runner, IDS, [12]), all_logits(plain, IDS, [12]), atol=1e-4, rtol=1e-4)
    assert_noted(runner)


def test_stacked_experts_whatever_their_names(tmp_path: Path) -> None:
    BY_NAME["granite-moe"].save(tmp_path)
    said = json.dumps({"quantization_config": {"quant_method": "experts_int8"}})
    runner, plain = (start(tmp_path, max_model_len=64, **more) for more in ({"config_overrides": said}, {}))
    got, want = (all_logits(one, IDS, [12]) for one in (runner, plain))
    assert 0 < float((got - want).std() / want.std()) < 0.03
    assert_noted(runner)


def assert_noted(runner: Runner) -> None:
    of_attention = [one.method for one in runner.model.linears() if one.method.form == "dense"]
    assert of_attention
    notes = runner.model.table.describe_unused()
    [of_experts] = [note for note in notes if "W8A16 weights, dequantized" in note]
    assert ".experts" in of_experts or ".block_sparse_moe" in of_experts
