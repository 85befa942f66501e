"""Broken adapters are refused, each with its cause."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from peft_adapters import save_adapter
from placed_adapters import EXACT, read_adapter
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, start

from blockyard.services.gpu_worker.lora.read_modules import AdapterLimits, read_modules
from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.services.gpu_worker.parallel.rank_group import RankGroup
from blockyard.services.gpu_worker.parallel.replicas import ExpertExchange
from blockyard.services.gpu_worker.parallel.shares import WHOLE
from blockyard.shared.errors import AdapterError

PREFIX = "base_model.model.model.layers.1.self_attn.q_proj"
A, B = f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight"
A7, B7 = A.replace("layers.1", "layers.7"), B.replace("layers.1", "layers.7")
ONES = {A: torch.ones(4, 64), B: torch.ones(64, 4)}
LIMITS = AdapterLimits(dtype=torch.float32, max_rank=8, with_bias=False, max_rows=200)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> ModelTargets:
    folder = tmp_path_factory.mktemp("base")
    BY_NAME["llama"].save(folder)
    return ModelTargets(start(folder).model)


def write(folder: Path, **config: Any) -> dict[str, torch.Tensor]:
    """A whole adapter of one module. Returns its tensors."""
    tensors = dict(ONES)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def test_an_adapter_is_read(targets: ModelTargets, tmp_path: Path) -> None:
    tensors = write(tmp_path)
    adapter, notes = read_adapter(tmp_path, targets, LIMITS), read_modules(tmp_path, LIMITS).notes
    [[delta]] = adapter.deltas.values()
    assert delta.b is not None and torch.equal(delta.b, tensors[B] * 2) and not notes
    assert adapter.size_bytes == 4 * 128 * 4


def test_the_digest_is_of_the_bytes(targets: ModelTargets, tmp_path: Path) -> None:
    digests = []
    for i, change in enumerate(({}, {}, {"lora_alpha": 9})):
        folder = tmp_path / str(i)
        folder.mkdir()
        write(folder, **change)
        digests.append(read_adapter(folder, targets, LIMITS).digest)
    assert digests[0] == digests[1] != digests[2]


def replaced(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Replaces tensors of the file; None removes one."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors") | {"x": torch.zeros(1)}
        del tensors["x"]
        for name, value in changes.items():
            tensors.pop(name, None)
            if value is not None:
                tensors[name] = value
        save_file(tensors, folder / "adapter_model.safetensors")

    return change


def cut(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def saved_by_torch(value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "adapter_model.safetensors").unlink()
        torch.save({A: value}, folder / "adapter_model.bin")

    return change


NAN = torch.full((4, 64), float("nan"))
WRONG = [
    (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "neither"),
    (cut, "safetensors"),
    (saved_by_torch(Path("x")), "other objects than tensors"),
    (saved_by_torch(torch.eye(4).to_sparse()), "no plain matrix"),
    (saved_by_torch(torch.zeros(1).expand(4, 1 << 50)), "no plain matrix"),
    (lambda folder: write(folder, r=16), "rank"),
    (lambda folder: write(folder, target_modules=["k_proj"]), "target_modules"),
    (lambda folder: write(folder, target_modules=["q_proj", "k_proj"]), "k_proj"),
    (replaced(**{A: torch.ones(9, 64), B: torch.ones(64, 9)}), "rank"),
    (replaced(**{A: None}), "only one"),
    (replaced(**{A: torch.ones(4, 32)}), "32"),
    (replaced(**{B: torch.ones(96, 4)}), "96"),
    (replaced(**{A: NAN}), "finite"),
    (replaced(**{A: ONES[A] * 1e38, B: ONES[B] * 1e38}), "layers.1.self_attn.q_proj are too large for float32"),
    (replaced(**{A: torch.ones(4, 64, dtype=torch.int32)}), "int32"),
    (replaced(**{A: torch.ones(4, 64).to(torch.float8_e4m3fn)}), "float8_e4m3fn"),
    (replaced(**{f"{PREFIX}.lora_magnitude_vector": torch.ones(64)}), "lora_magnitude_vector"),
    (replaced(**{f"{PREFIX}.lora_B.bias": torch.ones(64)}), "--enable-lora-bias"),
    (saved_by_torch(torch.empty(4, 64, device="meta")), "a dictionary of tensors"),
    (replaced(**{A.replace(".weight", ".default.weight"): torch.zeros(4, 64)}), "two tensors for a of model.layers.1"),
    (replaced(**{A.removeprefix("base_model.model."): torch.zeros(4, 64)}), "two tensors for a of model.layers.1"),
    (replaced(**{one.replace("model.layers", "layers"): ONES[one] for one in (A, B)}), "are the same module"),
    (replaced(**{A7: torch.ones(4, 64), B7: torch.ones(64, 4)}), "layers.7"),
]


HEAD, EMBEDDING = "base_model.model.lm_head", "base_model.model.model.embed_tokens"
EITHER = ["q_proj", "embed_tokens"]
SAVED = {"modules_to_save": ["lm_head"]}
TRAINED = f"{EMBEDDING}.token_adapter.trainable_tokens_delta"


def tokens(own: dict[str, torch.Tensor], **config: Any) -> Callable[[Path], None]:
    """Adds tensors of embedding or head to an adapter."""
    return lambda folder: save_file(write(folder, **config) | own, folder / "adapter_model.safetensors")


WRONG += [
    (tokens({f"{HEAD}.weight": torch.ones(211, 64)}, **SAVED), "211 rows of its own for lm_head, --lora-extra-vocab"),
    (tokens({f"{HEAD}.weight": torch.ones(215, 64)}, **SAVED), "has no embedding for them"),
    (tokens({f"{HEAD}.weight": torch.ones(211, 32)}, **SAVED), "32"),
    (tokens({}, **SAVED), "modules_to_save lm_head"),
    (tokens({"base_model.model.model.norm.weight": torch.ones(64)}, modules_to_save=["norm"]), "model.norm"),
    (tokens({f"{EMBEDDING}.lora_embedding_A": torch.ones(4, 211)}, target_modules=EITHER), "only one"),
    (tokens({}, trainable_token_indices=[1]), "trainable_token_indices"),
    (
        tokens({TRAINED: torch.ones(1, 64)}, trainable_token_indices={"embed_tokens": [1], "lm_head": [1]}),
        "trainable_token_indices lm_head: the adapter has no tensors",
    ),
    (tokens({}, target_parameters=["mlp.experts.down_proj"]), "target_parameters mlp.experts.down_proj"),
    (tokens({TRAINED: torch.ones(2, 64)}, trainable_token_indices=[1]), "2 trained rows"),
    (tokens({TRAINED: torch.ones(1, 64)}, trainable_token_indices=[211]), "token 211"),
]


@pytest.mark.parametrize(("change", "cause"), WRONG, ids=range(len(WRONG)))
def test_a_broken_adapter(change: Callable[[Path], None], cause: str, targets: ModelTargets, tmp_path: Path) -> None:
    write(tmp_path)
    change(tmp_path)
    with pytest.raises(AdapterError) as e:
        read_adapter(tmp_path, targets, LIMITS)
    assert cause in str(e.value) and "\n" not in str(e.value)


def test_modules_that_no_adapter_may_change(targets: ModelTargets, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(AdapterError, match="--lora-target-modules allows k_proj, v_proj"):
        read_adapter(tmp_path, targets, AdapterLimits(dtype=torch.float32, target_modules=("k_proj", "v_proj")))


def test_a_rank_above_the_limit(targets: ModelTargets, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(AdapterError, match="--max-lora-rank is 3"):
        read_adapter(tmp_path, targets, AdapterLimits(dtype=torch.float32, max_rank=3))


def test_experts_that_adapters_may_not_change(tmp_path: Path) -> None:
    """Those that several workers have, and those that move: no matrix is left out silently."""
    theirs = BY_NAME["qwen3-moe"].save(tmp_path / "base")
    save_adapter(theirs, tmp_path / "adapter", target_modules="all-linear")
    model = start(tmp_path / "base").model
    read_adapter(tmp_path / "adapter", ModelTargets(model), EXACT)
    exchange = ExpertExchange(cast(RankGroup, None), WHOLE)
    for field, value, otherwise in (("moves_experts", True, False), ("exchange", exchange, None)):
        setattr(model.table, field, value)
        with pytest.raises(AdapterError, match=r"changes experts, such as model.layers.0.mlp.experts.*: with --enable"):
            read_adapter(tmp_path / "adapter", ModelTargets(model), EXACT)
        setattr(model.table, field, otherwise)
