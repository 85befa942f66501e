"""Experts of a 16-bit checkpoint, rounded to int8 while they load."""

import json
from pathlib import Path

import pytest
import torch
from model_logits import all_logits
from quantized_checkpoint import IDS, write
from tiny_models import start
from torch import Tensor


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
    of_attention = [one.method for one in runner.model.linears() if one.method.form == "dense"]
    assert of_attention
    notes = runner.model.table.describe_unused()
    assert any("W8A16 weights, dequantized" in note and ".experts" in note for note in notes)
