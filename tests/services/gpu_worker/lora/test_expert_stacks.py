"""Stacks over the parameters of experts against PEFT: of all kinds of checkpoints, and as older releases have them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from peft_adapters import adapt, adapted_logits, peft_logits, save_adapter
from tiny_models import BY_NAME, VOCAB, Tiny, start

IDS = np.random.default_rng(4).integers(2, VOCAB, 30).tolist()
CHUNKS = [17, 1, 12]
LAST_OLD = "0.19.0"  # release of PEFT that has the inputs of all stacks for their second dimension
MIXTURES = {"granite-moe": "block_sparse_moe", "llama4": "feed_forward", "gpt-oss": "mlp", "olmoe": "mlp"}
TARGETS = [["gate_up_proj"], ["down_proj"], ["gate_up_proj", "down_proj"]]


@contextmanager
def old_release() -> Iterator[None]:
    """PEFT as it was: it asks no class whether its stacks are transposed."""
    new = ParamWrapper.update_layer

    def update_layer(self: Any, *args: Any, **fields: Any) -> None:
        experts = self.get_base_layer()
        own = experts.__dict__.get("is_transposed")
        experts.__dict__["is_transposed"] = True
        try:
            new(self, *args, **fields)
        finally:
            del experts.__dict__["is_transposed"]
            if own is not None:
                experts.__dict__["is_transposed"] = own

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParamWrapper, "update_layer", update_layer)
        yield


def save(tiny: Tiny, folder: Path, parameters: list[str]) -> PeftModel:
    own = tiny.name.removesuffix("-square")
    names = [f"{MIXTURES[own]}.experts.{one}" for one in parameters]
    fields = {"rank_pattern": {"gate_up_proj": 2}, "alpha_pattern": {"down_proj": 5}, "r": 3}
    return save_adapter(tiny.save(folder / "base"), folder / "a", target_modules=[], target_parameters=names, **fields)


def check(model: PeftModel, folder: Path) -> None:
    runner = start(folder / "base")
    adapt(runner, folder / "a")
    expected = peft_logits(model, IDS)
    got, base = (adapted_logits(runner, IDS, CHUNKS, place) for place in (0, None))
    assert float((base - expected).abs().max()) > 0.01
    assert torch.allclose(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("parameters", TARGETS, ids=str)
@pytest.mark.parametrize("name", MIXTURES)
def test_stacks(name: str, parameters: list[str], tmp_path: Path) -> None:
    """Llama 4's class does not say that its stacks are transposed, and Granite's checkpoints name them otherwise."""
    check(save(BY_NAME[name], tmp_path, parameters), tmp_path)


def square(name: str) -> Tiny:
    """With matrices of which no shape tells inputs from outputs: OLMoE 7B, MiniMax M2 and gpt-oss have such."""
    inner = {"gpt-oss": 64}.get(name, 32)
    return replace(BY_NAME[name], name=f"{name}-square", fields=BY_NAME[name].fields | {"intermediate_size": inner})


@pytest.mark.parametrize("tiny", [BY_NAME["olmoe"], *map(square, MIXTURES)], ids=lambda one: one.name)
def test_stacks_of_older_releases(tiny: Tiny, tmp_path: Path) -> None:
    with old_release():
        model = save(tiny, tmp_path, TARGETS[2])
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peft_version": LAST_OLD}))
    check(model, tmp_path)


@pytest.mark.parametrize("name", ["olmoe", "gpt-oss", "granite-moe"])
def test_square_stacks(name: str, tmp_path: Path) -> None:
    check(save(square(name), tmp_path, TARGETS[2]), tmp_path)
