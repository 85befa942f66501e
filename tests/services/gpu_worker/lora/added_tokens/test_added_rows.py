"""Adapters of models with resized embeddings, against PEFT, in float32."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_adapters import adapt, adapted_logits, peft_logits, save_adapter
from placed_adapters import EXACT, read_adapter
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, VOCAB, start

from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.shared.errors import AdapterError

ADDED = 3
IDS = [5, VOCAB, 9, VOCAB + 2, 11, 2, VOCAB + 1, VOCAB + 1, 17, 40]
CHUNKS = [6, 1, 1, 2]
ADAPTERS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": ["q_proj"]}),
    ("llama-tied", {"target_modules": ["q_proj"]}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
    ("llama-tied", {"target_modules": ["embed_tokens"]}),
    ("gemma2", {"target_modules": ["q_proj"]}),  # with a cap of the logits
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "trained_rows": [4, 9]}),
    ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [9, VOCAB, VOCAB + 2]}),
    ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [VOCAB + 1]}),
]


def save_resized(name: str, folder: Path, number: int = ADDED, **fields: Any) -> Any:
    """Writes a model to `base` and an adapter that adds tokens to `adapter`. Returns PEFT's model."""
    theirs = BY_NAME[name].save(folder / "base")
    theirs.resize_token_embeddings(VOCAB + number, mean_resizing=False)
    return save_adapter(theirs, folder / "adapter", saves_embedding=True, **fields)


@pytest.mark.parametrize(("name", "fields"), ADAPTERS, ids=str)
def test_resized_embeddings(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    expected = peft_logits(save_resized(name, tmp_path, **fields), IDS)
    runner = start(tmp_path / "base")
    adapt(runner, tmp_path / "adapter")
    got = adapted_logits(runner, IDS, CHUNKS, 0)
    assert got.shape == expected.shape == (len(IDS), VOCAB + ADDED)
    assert float((got - expected).abs().max()) <= 1e-4
    plain = [token for token in IDS if token < VOCAB]
    assert adapted_logits(runner, plain, [len(plain)], None).shape == (len(plain), VOCAB)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_of_other_rows_are_minus_infinity(name: str, tmp_path: Path) -> None:
    """Rows without an adapter, and those of one that adds fewer tokens."""
    save_resized(name, tmp_path / "a", target_modules=["q_proj"])
    save_resized(name, tmp_path / "b", number=1, target_modules=["q_proj"])
    runner = start(tmp_path / "a" / "base")
    adapt(runner, tmp_path / "a" / "adapter", tmp_path / "b" / "adapter")
    rows, hidden = runner.model.adapter_rows, torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    rows.begin(torch.tensor([-1, 0, 1], dtype=torch.int32))
    with torch.inference_mode():
        logits = runner.model.logits(hidden.clone())
        rows.end()
        plain = runner.model.logits(hidden.clone())
    assert torch.equal(logits[0, :VOCAB], plain[0])
    assert (logits[0, VOCAB:] == -math.inf).all() and (logits[2, VOCAB + 1 :] == -math.inf).all()
    assert logits[1].isfinite().all() and logits[2, : VOCAB + 1].isfinite().all()


def test_the_file_of_vllm(tmp_path: Path) -> None:
    """The same rows in `new_embeddings.safetensors`."""
    expected = peft_logits(save_resized("llama", tmp_path, target_modules=["q_proj"]), IDS)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    rows = {
        name: next(tensors.pop(key) for key in sorted(tensors) if module in key)[VOCAB:].clone()
        for name, module in (("input_embeddings", "embed_tokens"), ("output_embeddings", "lm_head"))
    }
    save_file(tensors, path)
    save_file(rows, path.with_name("new_embeddings.safetensors"))
    runner = start(tmp_path / "base")
    adapt(runner, tmp_path / "adapter")
    assert float((adapted_logits(runner, IDS, CHUNKS, 0) - expected).abs().max()) <= 1e-4
    save_file(rows | {"others": torch.ones(2)}, path.with_name("new_embeddings.safetensors"))
    with pytest.raises(AdapterError, match="others"):
        read_adapter(path.parent, ModelTargets(runner.model), EXACT)


def test_broken_rows_are_refused(tmp_path: Path) -> None:
    save_resized("llama", tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors, targets = load_file(path), ModelTargets(start(tmp_path / "base").model)
    with pytest.raises(AdapterError, match="adds 3 tokens, --lora-extra-vocab-size is 2"):
        read_adapter(path.parent, targets, AdapterLimits(dtype=torch.float32, max_rows=2))
    [embedding] = [name for name in tensors if "embed_tokens" in name]
    [head] = [name for name in tensors if "lm_head" in name]
    save_file({name: value for name, value in tensors.items() if name != embedding}, path)
    with pytest.raises(AdapterError, match="has no embedding for them"):
        read_adapter(path.parent, targets, EXACT)
    save_file(tensors | {head: tensors[head][:-1].clone()}, path)
    with pytest.raises(AdapterError, match="adds 3 tokens to the embedding and 2 to the head"):
        read_adapter(path.parent, targets, EXACT)
    save_file(tensors | {embedding: tensors[embedding][:, :-1].clone()}, path)
    with pytest.raises(AdapterError, match="have the width"):
        read_adapter(path.parent, targets, EXACT)
