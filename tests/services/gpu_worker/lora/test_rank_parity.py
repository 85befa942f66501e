"""Adapters divided among ranks, which are processes: the logits are those of PEFT."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rank_logits
import torch
from peft_adapters import peft_logits, save_adapter
from tiny_models import BY_NAME, VOCAB

Adapters = Mapping[str, tuple[str, dict[str, Any]]]  # by folder: the model, and fields of the adapter's config
ALL = {"target_modules": "all-linear"}
ROWS = [*range(3, 200, 9)]
OF_TOKENS: Adapters = {
    "embedding": ("llama", {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    "tied": ("llama-tied", {"target_modules": ["q_proj"], "trainable_token_indices": ROWS}),
    "saved": (
        "llama",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"], "trained_rows": ROWS},
    ),
}
# with tokens that they add to the vocabulary
NUM_ADDED = 3
ADDING: Adapters = {
    "added": ("llama", {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    "added-tied": ("llama-tied", {"target_modules": ["embed_tokens"]}),
    "added-capped": ("gemma2", {"target_modules": ["q_proj"], "trainable_token_indices": [9, VOCAB, VOCAB + 2]}),
}
# separate, joined, by groups, transposed and shared matrices of q, k and v; joint gate and up; layers in parallel;
# norms behind sublayers; experts in stacks and in pairs; latent attention; biases
FAMILIES = (
    "llama",
    "phi3",
    "gpt2",
    "gpt-neox",
    "falcon-40b-like",
    "falcon-7b-like",
    "gemma4",
    "cohere",
    "olmo2",
    "opt",
)
MIXTURES = ("qwen3-moe", "mixtral", "gpt-oss", "deepseek-v3")
TWO: Adapters = {
    **{name: (name, ALL) for name in (*FAMILIES, *MIXTURES)},
    "biases": ("llama-odd", {"target_modules": ["q_proj", "down_proj"], "bias": "all"}),
    "lora-bias": ("llama-odd", {"target_modules": ["k_proj", "o_proj"], "lora_bias": True}),
    **OF_TOKENS,
    **ADDING,
}
UNEVEN: Adapters = {
    **{name: (name, ALL) for name in ("llama-odd", "gpt-oss", "deepseek-v3", "cohere", "olmo2")},
    "low-rank": ("llama-odd", {"target_modules": ["q_proj", "o_proj", "down_proj"], "r": 1}),
    "lora-bias": ("llama-odd", {"target_modules": ["k_proj", "o_proj"], "lora_bias": True}),
    **OF_TOKENS,
    **ADDING,
}
SPREAD: Adapters = {name: (name, ALL) for name in ("mixtral", "gpt-oss", "deepseek-v3")}
AS_GPU: Adapters = {name: (name, ALL) for name in ("llama", "phi3")} | {**OF_TOKENS, **ADDING}
STAGES: Adapters = {name: (name, ALL) for name in ("llama", "deepseek-v3", "cohere", "gpt2")} | {**OF_TOKENS, **ADDING}


def differences(adapters: Adapters, root: Path, size: int, *flags: str, num_stages: int = 1) -> dict[str, float]:
    """The largest difference of logits, by folder."""
    expected, folders = dict[str, torch.Tensor](), list[Path]()
    for name, (model, fields) in adapters.items():
        theirs, num_added, folder = BY_NAME[model].save(root / name), NUM_ADDED * (name in ADDING), root / name
        if num_added:
            theirs.resize_token_embeddings(VOCAB + num_added, mean_resizing=False)
            (folder / rank_logits.ADDED).write_text(str(num_added))
        ids = rank_logits.prompt(num_added)
        with torch.no_grad():
            base = theirs(torch.tensor([ids])).logits[0]
        saved = {"saves_embedding": True} if num_added else {}
        expected[name] = peft_logits(save_adapter(theirs, folder / rank_logits.ADAPTER, **saved, **fields), ids)
        assert float((expected[name] - base).abs().max()) > 0.01, f"{name}: an adapter without an effect shows nothing"
        folders.append(folder)
    rank_logits.run(size, root / "group", folders, *flags, num_stages=num_stages)
    found = dict[str, float]()
    for folder in folders:
        got, want = torch.load(folder / rank_logits.OUTPUT), expected[folder.name]
        assert (got[:, want.shape[1] :] == -torch.inf).all(), "columns of tokens that the adapter does not add"
        found[folder.name] = float((got[:, : want.shape[1]] - want).abs().max())
    return found


def wrong(found: dict[str, float]) -> dict[str, float]:
    return {name: one for name, one in found.items() if not one <= 1e-4}


def test_two_ranks(tmp_path: Path) -> None:
    assert wrong(differences(TWO, tmp_path, 2)) == {}


def test_both_matrices_divided_unevenly(tmp_path: Path) -> None:
    """Of some adapters a rank has none of the numbers between A and B."""
    assert wrong(differences(UNEVEN, tmp_path, 3, rank_logits.FULLY_SHARDED)) == {}


def test_places_of_gpus(tmp_path: Path) -> None:
    """With the references of their kernels."""
    flags = rank_logits.AS_GPU, rank_logits.FULLY_SHARDED
    assert wrong(differences(AS_GPU, tmp_path, 2, *flags, num_stages=2)) == {}


def test_experts_that_are_whole(tmp_path: Path) -> None:
    assert wrong(differences(SPREAD, tmp_path, 3, rank_logits.SPREAD, rank_logits.FULLY_SHARDED)) == {}


def test_stages_of_two_ranks(tmp_path: Path) -> None:
    assert wrong(differences(STAGES, tmp_path, 2, num_stages=2)) == {}
