"""Every encoder and classifier against transformers in float32, alone and packed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_model import load_model, run_packed
from tiny_checkpoint import VOCAB, Tiny
from tiny_poolers import BY_NAME, ENCODERS, hidden_and_outputs

from blockyard.services.gpu_worker.models.interface import Model

LENGTHS = (1, 2, 9, 40, 41, 41, 100)


@pytest.fixture(
    scope="module", params=[pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)]
)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


@pytest.fixture(scope="module", params=ENCODERS, ids=lambda tiny: tiny.name)
def pair(request: pytest.FixtureRequest, device: str, tmp_path_factory: Any) -> tuple[Tiny, Any, Model]:
    tiny: Tiny = request.param
    folder = tmp_path_factory.mktemp(tiny.name)
    theirs = tiny.save(folder).to(device)
    return tiny, theirs, load_model(folder, device)


def texts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(2, VOCAB, n).tolist() for n in lengths]


def test_hidden_states_and_outputs(pair: tuple[Tiny, Any, Model]) -> None:
    """Packed beside others in another order, and alone."""
    tiny, theirs, ours = pair
    given = texts()
    order = [3, 0, 6, 5, 1, 4, 2]
    packed = run_packed(ours, [given[i] for i in order])
    for text, hidden in zip([given[i] for i in order], packed, strict=True):
        expected, outputs = hidden_and_outputs(theirs, text)
        assert float(expected.std()) > 0.1
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
        [alone] = run_packed(ours, [text])
        torch.testing.assert_close(alone, expected, atol=1e-4, rtol=1e-4)
        if outputs is None or tiny.name.endswith("-masked"):
            assert ours.logits(hidden) is hidden, "it has no output layer"
            continue
        if tiny.name.endswith("-tokens"):
            got = ours.logits(hidden)
        elif tiny.name == "modernbert-mean":
            got = ours.logits(hidden.mean(0, keepdim=True))
        elif tiny.name == "embeddinggemma-classes":
            got = ours.logits(hidden[-1:])
        else:
            got = ours.logits(hidden[:1])
        assert outputs.numel() == 1 or float(outputs.std()) > 0.03
        torch.testing.assert_close(got, outputs.reshape(got.shape), atol=1e-4, rtol=1e-4)


def test_token_types_of_pairs(device: str, tmp_path: Path) -> None:
    theirs = BY_NAME["bert-classes"].save(tmp_path).to(device)
    ours = load_model(tmp_path, device)
    [text] = texts((30,))
    types = [0] * 11 + [1] * 19
    expected, outputs = hidden_and_outputs(theirs, text, types)
    [hidden] = run_packed(ours, [text], [types])
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.logits(hidden[:1]), outputs, atol=1e-4, rtol=1e-4)
    [without] = run_packed(ours, [text])
    assert float((without - hidden).abs().max()) > 0.01


@pytest.mark.parametrize(("name", "positions"), [("bert", 130), ("roberta", 128), ("xlm-roberta", 128)])
def test_usable_positions(name: str, positions: int, tmp_path: Path) -> None:
    """RoBERTa's begin behind the padding token's: two fewer are usable, and the last one is right."""
    theirs = BY_NAME[name].save(tmp_path)
    ours = load_model(tmp_path, "cpu")
    assert ours.shape.max_positions == positions
    assert not ours.shape.has_kv
    [text] = texts((positions,))
    [hidden] = run_packed(ours, [text])
    torch.testing.assert_close(hidden, hidden_and_outputs(theirs, text)[0], atol=1e-4, rtol=1e-4)
