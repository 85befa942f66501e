"""Models without KV on several ranks: the results of one rank, also after sleep."""

from pathlib import Path

import pytest
import torch
from packed_plans import rows_of, run
from rank_group import Group, report
from tiny_models import settings
from tiny_poolers import BY_NAME

from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.encoders.encoder_runner import EncoderRunner
from blockyard.services.gpu_worker.loading.sleep import SleepingRunner
from blockyard.shared.config.services.worker import WorkerConfig
from blockyard.shared.errors import ConfigError

TEXTS = [[2, 3, 4], [7], list(range(2, 60)), [9, 8]]
SECONDS = [1, 1, 20, 2]


def config(folder: Path, **fields: object) -> WorkerConfig:
    return settings(folder, **fields)


@pytest.mark.parametrize(("name", "size"), [("bert-classes", 2), ("modernbert", 3)])
def test_results_are_those_of_one_rank(name: str, size: int, tmp_path: Path) -> None:
    """Of pairs with token types, and of rotations of two kinds on ranks with uneven shares."""
    folder, seconds = tmp_path / "model", SECONDS if name == "bert-classes" else None
    BY_NAME[name].save(folder)
    alone = engine.start(config(folder), report)
    assert isinstance(alone, EncoderRunner)
    expected = rows_of(run(alone, TEXTS, second_starts=seconds))
    made = Group(config(folder, tensor_parallel_size=size), tmp_path)
    try:
        sleeping = SleepingRunner(made.start_any, lambda: 0)
        for level in (0, 1, 2):
            if level:
                sleeping.sleep(level)
                sleeping.reset(0)
            assert isinstance(made.runner, EncoderRunner)
            got = rows_of(run(made.runner, TEXTS, second_starts=seconds))
            torch.testing.assert_close(torch.stack(got), torch.stack(expected), atol=1e-5, rtol=1e-5)
    finally:
        made.team.close()
    assert not made.errors


def test_stages_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    BY_NAME["bert"].save(tmp_path / "model")
    made = Group(config(tmp_path / "model", pipeline_parallel_size=2), tmp_path)
    try:
        with pytest.raises(ConfigError, match="--pipeline-parallel-size 2: a model without KV runs in one stage"):
            made.start_any()
    finally:
        made.team.close()
