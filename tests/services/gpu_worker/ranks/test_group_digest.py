"""What ranks of several hosts compare: equal on hosts with other paths, unlike with other builds, weights or flags."""

import shutil
from pathlib import Path

import msgspec
import pytest

from blockyard.services.gpu_worker.ranks import group_digest
from blockyard.services.gpu_worker.ranks.group_digest import differences, make_digest
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig

SIZE = 300_000


def config(folder: Path, **fields: object) -> WorkerConfig:
    process = ProcessConfig(name=folder.name, bus=BusConfig(registry=f"ipc://{folder}/bus", bind=f"ipc://{folder}"))
    made = WorkerConfig(process=process, model_path=str(folder), tensor_parallel_size=2, num_nodes=2)
    return msgspec.structs.replace(made, **fields)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (first / "config.json").write_text("{}", "utf-8")
    (first / "model.safetensors").write_bytes(bytes(SIZE))
    shutil.copytree(first, second)
    return first, second


def test_other_paths_and_numbers_of_a_host_make_no_difference(folders: tuple[Path, Path]) -> None:
    first, second = folders
    other = config(second, node_rank=1, threads=3, kernel_cache="/cache", gpu=4)
    assert make_digest(config(first)) == make_digest(other)


@pytest.mark.parametrize("at", [0, SIZE // 2, SIZE - 1])
def test_other_weights(folders: tuple[Path, Path], at: int) -> None:
    """A file that was trained further differs everywhere; samples find it."""
    first, second = folders
    data = bytearray(SIZE)
    data[max(at - 20_000, 0) : at + 20_000] = b"x" * (min(at + 20_000, SIZE) - max(at - 20_000, 0))
    (second / "model.safetensors").write_bytes(data)
    assert "other weights" in differences(make_digest(config(second)), make_digest(config(first)))


def test_other_settings_of_the_model_or_flags(folders: tuple[Path, Path]) -> None:
    first, second = folders
    found = differences(make_digest(config(second, seed=3, dtype="half")), make_digest(config(first)))
    assert found == "other flags than the leader: dtype half, the leader's auto, seed 3, the leader's 0"
    (second / "config.json").write_text('{"eos_token_id": 2}', "utf-8")
    assert "other weights" in differences(make_digest(config(second)), make_digest(config(first)))


def test_another_build(folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_digest(config(folders[0]))
    monkeypatch.setattr(group_digest, "SOURCES", group_digest.SOURCES[:-1])
    assert "another build" in differences(make_digest(config(folders[0])), first)
