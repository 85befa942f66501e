"""A runner of a model without KV on each device, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_plans import rows_of
from packed_plans import run as run_plan
from tiny_checkpoint import VOCAB
from tiny_models import settings
from tiny_poolers import BY_NAME, hidden_and_outputs
from torch import Tensor

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.encoders.encoder_runner import EncoderRunner

LENGTHS = (1, 17, 40, 100, 41, 2)


@pytest.fixture(params=[pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return request.param


def start(folder: Path, device: str, **others: Any) -> EncoderRunner:
    runner = engine.start(settings(folder, device=device, **({"dtype": "float32"} | others)), lambda *_: None)
    assert isinstance(runner, EncoderRunner)
    return runner


def texts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(2, VOCAB, n).tolist() for n in LENGTHS]


def run(runner: EncoderRunner, given: list[list[int]]) -> list[Tensor]:
    found = run_plan(runner, given)
    assert not found.failures
    return rows_of(found)


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "modernbert", "embeddinggemma"])
@pytest.mark.parametrize("pooling", ["CLS", "MEAN", "LAST", "ALL"])
def test_vectors(pooling: str, name: str, device: str, tmp_path: Path) -> None:
    theirs = BY_NAME[name].save(tmp_path)
    runner = start(tmp_path, device, pooler_config=f'{{"pooling_type": "{pooling}", "normalize": false}}')
    for ids, got in zip(texts(), run(runner, texts()), strict=True):
        hidden, _ = hidden_and_outputs(theirs, ids)
        expected = {"CLS": hidden[0], "LAST": hidden[-1], "MEAN": hidden.mean(0), "ALL": hidden.flatten()}[pooling]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert-classes", "roberta-classes", "modernbert-classes", "modernbert-mean"])
def test_classes(name: str, device: str, tmp_path: Path) -> None:
    """The function of logits is applied once."""
    theirs = BY_NAME[name].save(tmp_path)
    for ids, got in zip(texts(), run(start(tmp_path, device), texts()), strict=True):
        logits = hidden_and_outputs(theirs, ids)[1]
        torch.testing.assert_close(got, logits[0].softmax(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "embeddinggemma"])
def test_bfloat16_stays_near(name: str, device: str, tmp_path: Path) -> None:
    """Against float64: as wrong as transformers in bfloat16 at most, by a half more."""
    half = BY_NAME[name].save(tmp_path).bfloat16()
    runner = start(tmp_path, device, dtype="bfloat16", pooler_config='{"pooling_type": "MEAN", "normalize": false}')
    got, given = run(runner, texts()), texts()
    theirs = [hidden_and_outputs(half, ids)[0].float().mean(0) for ids in given]
    exact = half.double()
    expected = [hidden_and_outputs(exact, ids)[0].mean(0) for ids in given]

    def error(found: list[Tensor]) -> float:
        return sum(float((one - other).square().sum()) for one, other in zip(found, expected, strict=True)) ** 0.5

    assert error(got) <= 1.5 * error(theirs)


def test_batch_invariant(device: str, tmp_path: Path) -> None:
    """The bits of a vector do not depend on the texts beside it."""
    BY_NAME["bert"].save(tmp_path)
    runner = start(tmp_path, device, batch_invariant=True)
    together = run(runner, texts())
    for ids, one in zip(texts(), together, strict=True):
        assert torch.equal(run(runner, [ids])[0], one)


def test_sleep(device: str, tmp_path: Path) -> None:
    BY_NAME["bert"].save(tmp_path)
    runner = start(tmp_path, device)
    before = run(runner, texts())
    runner.release_memory()
    runner.reclaim_memory()
    assert all(torch.equal(one, other) for one, other in zip(run(runner, texts()), before, strict=True))
