"""Adapters of PEFT against PEFT itself, in float32: families, single targets, patterns and biases."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft_adapters import adapt, adapted_logits, peft_logits, save_adapter
from safetensors.torch import load_file, save_file
from tiny_models import BY_NAME, VOCAB, Tiny, start
from torch.nn import Linear
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from blockyard.services.gpu_worker.lora.targets import ModelTargets
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.errors import AdapterError

IDS = np.random.default_rng(4).integers(2, VOCAB, 40).tolist()
CHUNKS = [17, 1, 1, 21]
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
# separate, joined, by groups, transposed and shared matrices of q, k and v; joint gate and up; rotations of a part of
# a head; layers in parallel; a head tied to the embedding; norms behind sublayers; a family that transformers runs
FAMILIES = [
    *("llama", "qwen2", "phi3", "gpt2", "gpt-neox", "falcon-40b-like", "falcon-7b-like", "gemma4", "glm4"),
    *("cohere", "olmo2", "opt-350m-like", "starcoder2", "smollm3", "qwen2-moe", "gpt-oss"),
    *("granite-moe", "minimax-m2", "olmoe", "opt", "arcee", "seed-oss", "glm", "granite", "olmo3", "ministral3"),
    *("cohere2", "gemma", "gemma2", "gemma3", "gemma4-moe"),
]
# of models that see, adapters of their text part; PEFT cannot wrap Llama 4's router, which returns a pair
TEXT_PARTS = ["mistral3", "gemma3-sees", "gemma4-sees", "llama4-sees", "llama4"]
TEXT_TARGETS = r"(.*language_model|model\.layers).*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"


def check(tiny: Tiny, folder: Path, fields: dict[str, Any], runner: Runner | None = None, **settings: Any) -> Runner:
    theirs = tiny.save(folder / "base")
    runner = runner or start(folder / "base", **settings)
    base = adapted_logits(runner, IDS, CHUNKS, None)
    model = save_adapter(theirs, folder / "adapter", **fields)
    adapt(runner, folder / "adapter")
    expected = peft_logits(model, IDS)
    got = adapted_logits(runner, IDS, CHUNKS, 0)
    difference, effect = float((got - expected).abs().max()), float((base - expected).abs().max())
    assert effect > 0.01, "an adapter without an effect shows nothing"
    assert difference <= 1e-4, f"largest difference {difference}"
    return runner


@pytest.mark.parametrize("name", FAMILIES)
def test_all_linear_layers(name: str, tmp_path: Path) -> None:
    check(BY_NAME[name], tmp_path, {"target_modules": "all-linear"})


@pytest.mark.parametrize("name", TEXT_PARTS)
def test_text_parts(name: str, tmp_path: Path) -> None:
    check(BY_NAME[name], tmp_path, {"target_modules": TEXT_TARGETS})


def test_a_class_of_transformers(tmp_path: Path) -> None:
    check(BY_NAME["qwen3"], tmp_path, {"target_modules": "all-linear"}, model_impl="transformers")


MIXTURES = ["qwen3-moe", "mixtral", "glm4-moe"]


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_and_their_router(name: str, tmp_path: Path) -> None:
    """PEFT has one pair of matrices for all experts of a stack, A with the expert slowest and B with it fastest."""
    check(BY_NAME[name], tmp_path, {"target_modules": "all-linear"})


LATENT = ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "deepseek-v3-halves", "glm4-moe-lite"]


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(name: str, tmp_path: Path) -> None:
    """Where K and V are never made: `kv_b_proj` alone, and with all others."""
    runner = check(BY_NAME[name], tmp_path / "up", {"target_modules": ["kv_b_proj"]})
    check(BY_NAME[name], tmp_path / "all", {"target_modules": "all-linear"}, runner)


STACKS = [["mlp.experts.gate_up_proj"], ["experts.down_proj"], ["gate_up_proj", "down_proj"]]


@pytest.mark.parametrize("parameters", STACKS)
def test_stacks_with_gate_and_up_in_turn(parameters: list[str], tmp_path: Path) -> None:
    fields = {"target_modules": [], "target_parameters": parameters, "r": 3, "alpha_pattern": {r".*\.down_proj": 5}}
    check(BY_NAME["gpt-oss"], tmp_path, fields)


def test_modules_of_single_experts(tmp_path: Path) -> None:
    """The same adapter, as a stack and with a module for each matrix of an expert."""
    tiny = BY_NAME["qwen3-moe"]
    theirs = tiny.save(tmp_path / "base")
    stack = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"], "r": 3, "lora_alpha": 6}
    save_adapter(theirs, tmp_path / "stack", **stack)
    single = tmp_path / "single"
    single.mkdir()
    names = [f"{expert}.{name}" for expert in range(8) for name in ("gate_proj", "up_proj")]
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["gate_proj", "up_proj"]}
    (single / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for key, value in load_file(tmp_path / "stack" / "adapter_model.safetensors").items():
        prefix, is_a = key.partition(".lora_")[0], "lora_A" in key
        for name in names:
            expert, inner = int(name[0]), slice(0, 32) if "gate" in name else slice(32, 64)
            own = value[3 * expert : 3 * expert + 3] if is_a else torch.unflatten(value, 1, (3, 8))[inner, :, expert]
            tensors[f"{prefix}.{name}.lora_{'A' if is_a else 'B'}.weight"] = own.contiguous().clone()
    save_file(tensors, single / "adapter_model.safetensors")
    runner, found = start(tmp_path / "base"), []
    for folder in (tmp_path / "stack", single):
        adapt(runner, folder)
        found.append(adapted_logits(runner, IDS, CHUNKS, 0))
    assert float((found[0] - found[1]).abs().max()) <= 1e-5
    assert float((found[0] - adapted_logits(runner, IDS, CHUNKS, None)).abs().max()) > 0.1


def test_each_target_alone(tmp_path: Path) -> None:
    tiny, runner = BY_NAME["llama"], None
    for target in LLAMA:
        runner = check(tiny, tmp_path / target, {"target_modules": [target]}, runner)


def test_random_subsets(tmp_path: Path) -> None:
    rng, tiny, runner = random.Random(7), BY_NAME["llama-tied"], None
    for i in range(4):
        targets = rng.sample(LLAMA, rng.randint(2, 6))
        fields = {"target_modules": targets, "r": rng.choice([1, 3, 16, 40]), "use_rslora": rng.random() < 0.5}
        runner = check(tiny, tmp_path / str(i), fields, runner)


def linear_names(theirs: PreTrainedModel) -> list[str]:
    """The last parts of the names of its linear layers. Merged weights of a tied head would change the embedding."""
    layers = [(name, one) for name, one in theirs.named_modules() if isinstance(one, (Linear, Conv1D))]
    tied = theirs.get_input_embeddings().weight
    return sorted({name.rpartition(".")[2] for name, one in layers if one.weight is not tied})


def drawn(names: list[str], rng: random.Random) -> list[list[str]]:
    """One target alone, and a random subset. PEFT adapts the gate and the up matrix of experts together."""
    pair, single = {"gate_proj", "up_proj"}, rng.choice(names)
    sets = [{single}, set(rng.sample(names, rng.randint(1, len(names))))]
    return [sorted(one | (pair if one & pair and pair <= set(names) else set())) for one in sets]


@pytest.mark.parametrize("name", [*FAMILIES, *MIXTURES, *LATENT])
def test_drawn_targets_against_merged_weights(name: str, tmp_path: Path) -> None:
    """Of each family another target alone, and a subset, with ranks and scales drawn by its name."""
    rng, tiny, runner = random.Random(name), BY_NAME[name], None
    for i, targets in enumerate(drawn(linear_names(tiny.save(tmp_path / "base")), rng)):
        fields = {"target_modules": targets, "r": rng.choice([1, 3, 16]), "use_rslora": rng.random() < 0.5}
        model = save_adapter(tiny.save(tmp_path / "base"), tmp_path / str(i), **fields)
        runner = runner or start(tmp_path / "base")
        adapt(runner, tmp_path / str(i))
        got, base = (adapted_logits(runner, IDS, CHUNKS, place) for place in (0, None))
        expected = peft_logits(model.merge_and_unload(), IDS)
        assert float((base - expected).abs().max()) > 1e-3, f"{targets} have no effect"
        assert float((got - expected).abs().max()) <= 1e-4, targets


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": r".*\.(0|2)\.self_attn\.(q|v)_proj"},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [1, 2], "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1},
        {"target_modules": "all-linear", "exclude_modules": ["down_proj", "layers.0.self_attn.q_proj"]},
        {"target_modules": "all-linear", "exclude_modules": r".*\.1\..*"},
        {
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.down_proj": 9},
            "alpha_pattern": {"q_proj": 3, "down_proj": 20},
        },
        {"target_modules": ["q_proj"], "bias": "all"},
        {"target_modules": ["k_proj", "gate_proj"], "bias": "lora_only"},
        {"target_modules": ["k_proj", "o_proj"], "lora_bias": True},
    ],
    ids=str,
)
def test_fields_of_the_config(fields: dict[str, Any], tmp_path: Path) -> None:
    check(BY_NAME["llama-odd"], tmp_path, fields)


def test_a_bias_behind_which_a_gate_multiplies(tmp_path: Path) -> None:
    """The gate of shared experts is in the input of their last product, where a bias would be without it."""
    fields = {"lora_bias": True}
    runner = check(BY_NAME["qwen2-moe"], tmp_path / "a", {"target_modules": ["o_proj", "up_proj"]} | fields)
    with pytest.raises(AdapterError, match=r"a bias for model.layers.1.mlp.shared_expert.down_proj.*by a gate"):
        check(BY_NAME["qwen2-moe"], tmp_path / "b", {"target_modules": ["down_proj"]} | fields, runner)


ROWS = sorted(set(IDS[3:30]))
OF_TOKENS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"target_modules": ["embed_tokens"]}),
    ("llama-tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    ("gemma", {"target_modules": ["embed_tokens", "lm_head"]}),
    ("opt-350m-like", {"target_modules": ["embed_tokens"]}),
    ("gpt2", {"target_modules": ["wte", "c_attn"]}),
    ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "trained_rows": ROWS}),
    ("llama-tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "trained_rows": ROWS}),
    ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": ROWS[::-1]}),
    ("llama-tied", {"target_modules": ["q_proj"], "trainable_token_indices": ROWS}),
    ("gemma2", {"target_modules": ["q_proj"], "trainable_token_indices": ROWS}),
    (
        "llama",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": ROWS[:3], "lm_head": ROWS[2:]}},
    ),
]


@pytest.mark.parametrize(("name", "fields"), OF_TOKENS, ids=str)
def test_embedding_and_head(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    """A head that is tied to the embedding is a target of its own."""
    check(BY_NAME[name], tmp_path, fields)


def test_merged_deltas(tmp_path: Path) -> None:
    """The same checkpoint with the deltas in its weights gives the same logits."""
    tiny = BY_NAME["phi3"]
    theirs = tiny.save(tmp_path / "base")
    merged = save_adapter(theirs, tmp_path / "adapter", target_modules="all-linear").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    ours, alone = start(tmp_path / "base"), start(tmp_path / "merged")
    adapt(ours, tmp_path / "adapter")
    difference = adapted_logits(ours, IDS, CHUNKS, 0) - adapted_logits(alone, IDS, CHUNKS, None)
    assert float(difference.abs().max()) <= 1e-4


def test_a_bin_file_is_the_same(tmp_path: Path) -> None:
    tiny = BY_NAME["llama"]
    theirs = tiny.save(tmp_path / "base")
    save_adapter(theirs, tmp_path / "a", target_modules=["q_proj"])
    from_tensors = start(tmp_path / "base")
    adapt(from_tensors, tmp_path / "a")
    expected = adapted_logits(from_tensors, IDS, CHUNKS, 0)
    torch.save(load_file(tmp_path / "a" / "adapter_model.safetensors"), tmp_path / "a" / "adapter_model.bin")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    adapt(from_tensors, tmp_path / "a")
    assert torch.equal(adapted_logits(from_tensors, IDS, CHUNKS, 0), expected)


def test_names_of_all_linear_layers(tmp_path: Path) -> None:
    tiny = BY_NAME["llama"]
    tiny.save(tmp_path)
    targets = ModelTargets(start(tmp_path).model)
    found = targets.find("model.layers.2.self_attn.k_proj")
    assert found is not None and (found.index, found.in_features) == (1, 64)
    assert targets.find("model.layers.9.self_attn.k_proj") is None
