"""A tiny Llama in lockstep and with plans ahead, once a module."""

import json
from pathlib import Path

import pytest
from reference_ops import run_ahead
from ties import Score
from tiny_models import BY_NAME, greedy_score, start

from blockyard.services.gpu_worker.runner import Runner

EOS = [1, *range(20, 30)]  # so many that some streams sample one


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def logits_of(folder: Path) -> Score:
    score = greedy_score(BY_NAME["llama"].save(folder))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": EOS}))
    (folder / "generation_config.json").unlink()
    return score


@pytest.fixture(scope="module")
def plain(folder: Path, logits_of: Score) -> Runner:
    return start(folder, max_model_len=64)


@pytest.fixture(scope="module")
def ahead(folder: Path, logits_of: Score) -> Runner:
    runner = start(folder, max_model_len=64)
    run_ahead(runner, capacity=6)
    return runner
