"""Folders of prompt adapters that are broken, or that are of something else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft_prompts import save_prompt
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME

from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits
from blockyard.services.gpu_worker.lora.read_prompt import PromptLimits, read_prompt
from blockyard.services.gpu_worker.lora.reader_client import NotRead, ReaderProcess
from blockyard.shared.errors import AdapterError

LIMITS = PromptLimits(max_tokens=8, width=64, dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_prompt(BY_NAME["llama"].save(tmp_path / "base"), tmp_path / "adapter", 5)
    return tmp_path / "adapter"


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_vectors_and_a_digest_of_the_bytes(folder: Path) -> None:
    read = read_prompt(folder, LIMITS)
    assert torch.equal(read.vectors, load_file(folder / "adapter_model.safetensors")["prompt_embeddings"])
    assert not read.notes
    change_config(folder, something_new=1)
    again = read_prompt(folder, LIMITS)
    assert again.digest != read.digest and again.notes == [
        "adapter_config.json: something_new: not known, and not read"
    ]


def test_a_bin_file(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    assert torch.equal(read_prompt(folder, LIMITS).vectors, tensors["prompt_embeddings"])


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"peft_type": "PREFIX_TUNING"}, "peft_type 'PREFIX_TUNING' is no prompt adapter that is served"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "peft_type 'MULTITASK_PROMPT_TUNING'"),
        ({"peft_type": "LORA"}, "peft_type 'LORA'"),
        ({"num_virtual_tokens": 9}, "num_virtual_tokens is 9; at most 8 are served"),
        ({"num_virtual_tokens": 4}, "has 5 rows, num_virtual_tokens is 4"),
        ({"num_virtual_tokens": 0}, "num_virtual_tokens"),
        ({"num_transformer_submodules": 2}, "num_transformer_submodules 2 is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_configs_that_are_refused(folder: Path, fields: dict[str, Any], cause: str) -> None:
    change_config(folder, **fields)
    with pytest.raises(AdapterError, match=cause):
        read_prompt(folder, LIMITS)


@pytest.mark.parametrize(
    ("tensors", "cause"),
    [
        ({"prompt_embeddings": torch.zeros(5, 32)}, r"shape \[5, 32\]; the model's embeddings have 64"),
        ({"prompt_embeddings": torch.full((5, 64), torch.nan)}, "not finite"),
        ({"other": torch.zeros(1)}, "has other, which no prompt adapter has"),
        ({}, "has no prompt_embeddings"),
        ({"prompt_embeddings": torch.zeros(5 << 10, 64)}, "bytes, more than"),
    ],
)
def test_weights_that_are_refused(folder: Path, tensors: dict[str, torch.Tensor], cause: str) -> None:
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=cause):
        read_prompt(folder, LIMITS)


def test_the_reader_process_answers_both_kinds_apart(folder: Path) -> None:
    reader = ReaderProcess(AdapterLimits(dtype=torch.float32), prompts=LIMITS)
    try:
        reader.ask(-1, str(folder), is_prompt=True)
        reader.ask(1, str(folder))
        reader.ask(-2, str(folder / "none"), is_prompt=True)
        prompts, modules = [], []
        while len(prompts) < 2 or not modules:
            prompts += reader.receive_prompts()
            modules += reader.receive()
    finally:
        reader.close()
    (first, read), (second, cause) = prompts
    assert (first, second) == (-1, -2) and isinstance(cause, NotRead) and "is no folder" in cause.cause
    assert not isinstance(read, NotRead) and torch.equal(read.vectors, read_prompt(folder, LIMITS).vectors)
    assert "is a prompt adapter, not a LoRA adapter" in str(modules[0][1])
