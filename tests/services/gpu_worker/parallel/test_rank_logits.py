"""Every architecture divided among ranks, which are processes: the logits are those of transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import rank_logits
import torch
from tiny_models import BY_NAME, MODELS

UNLIKE = ("llama", "gemma3", "mixtral", "deepseek-v3", "cohere", "gpt2", "opt")
MIXTURES = ("mixtral", "gpt-oss", "llama4", "gemma4-moe", "deepseek-v3")
UNEVEN = ("llama-odd", "gpt-oss", "deepseek-v3", "cohere", "olmo2")  # on 3 and on 4 ranks

Compare = Callable[[str], float]


def compared(size: int, names: list[str], root: Path, *flags: str, num_stages: int = 1) -> Compare:
    """Runs all checkpoints on one group of ranks. Returns the largest difference of logits by name."""
    expected: dict[str, torch.Tensor] = {}
    for name in names:
        theirs = BY_NAME[name].save(root / name)
        with torch.no_grad():
            expected[name] = theirs(torch.tensor([rank_logits.prompt()])).logits[0]
    rank_logits.run(size, root / "group", [root / name for name in names], *flags, num_stages=num_stages)

    def difference(name: str) -> float:
        got = torch.load(root / name / rank_logits.OUTPUT)
        return float((got - expected[name]).abs().max())

    return difference


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Compare:
    return compared(2, [tiny.name for tiny in MODELS], tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [tiny.name for tiny in MODELS])
def test_two_ranks(name: str, two_ranks: Compare) -> None:
    assert two_ranks(name) <= 1e-4


@pytest.mark.parametrize("size", [3, 4])
def test_uneven_shares(size: int, tmp_path: Path) -> None:
    difference = compared(size, list(UNEVEN), tmp_path)
    assert max(map(difference, UNEVEN)) <= 1e-4


def test_experts_that_are_whole(tmp_path: Path) -> None:
    """Stacked and one by one, transposed, in pairs, with biases, weights of the input, shared experts."""
    difference = compared(4, list(MIXTURES), tmp_path, "--spread")
    assert max(map(difference, MIXTURES)) <= 1e-4


def test_experts_that_have_moved(tmp_path: Path) -> None:
    difference = compared(3, list(MIXTURES), tmp_path, "--spread", "--moved")
    assert max(map(difference, MIXTURES)) <= 1e-4


@pytest.mark.parametrize(("size", "num_stages"), [(1, 2), (2, 2), (1, 3)])
def test_stages(size: int, num_stages: int, tmp_path: Path) -> None:
    """Dense, with windows, mixtures, latent, parallel layers with tied embeddings, learned positions."""
    difference = compared(size, list(UNLIKE), tmp_path, num_stages=num_stages)
    assert max(map(difference, UNLIKE)) <= 1e-4
