"""--safetensors-load-strategy: which bytes are read ahead, when, and what a broken file does."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from blockyard.services.gpu_worker.loading import page_cache
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig

PROCESS = ProcessConfig(name="gpu_worker", bus=BusConfig(registry="ipc:///x/bus", bind="ipc:///x"))
SIZES = {"model-1.safetensors": 10_000, "model-2.safetensors": 4_096, "model-3.safetensors": 1}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, size in SIZES.items():
        (tmp_path / name).write_bytes(os.urandom(size))
    return tmp_path


@pytest.fixture
def read_blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Name, start and length of each read."""
    found: list[tuple[str, int, int]] = []
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        num_read = real(fd, buffers, offset)
        found.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, offset, num_read))
        return num_read

    monkeypatch.setattr(page_cache.os, "preadv", preadv)
    return found


def config(folder: Path, strategy: str, **more: Any) -> WorkerConfig:
    fields = {"load_format": "safetensors", "prefetch_block_bytes": 4096, "prefetch_threads": 3} | more
    return WorkerConfig(process=PROCESS, model_path=str(folder), load_strategy=strategy, **fields)  # type: ignore[arg-type]


def test_eager_has_read_all_before_the_first_weight(folder: Path, read_blocks: list[tuple[str, int, int]]) -> None:
    with page_cache.read_ahead(config(folder, "eager")):
        assert sorted(read_blocks) == [
            ("model-1.safetensors", 0, 4096),
            ("model-1.safetensors", 4096, 4096),
            ("model-1.safetensors", 8192, 1808),
            ("model-2.safetensors", 0, 4096),
            ("model-3.safetensors", 0, 1),
        ]


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_of_a_host_divide_what_is_read_ahead(
    folder: Path, read_blocks: list[tuple[str, int, int]], nodes: int
) -> None:
    """Every block once on each host."""
    for node in range(nodes):
        asked = config(folder, "eager", tensor_parallel_size=2 * nodes, num_nodes=nodes, node_rank=node)
        halves = []
        for rank in asked.host_ranks:
            with page_cache.read_ahead(asked, rank):
                halves.append(len(read_blocks))
        assert halves == [3, 5]
        assert len(set(read_blocks)) == 5 and sum(size for _, _, size in read_blocks) == sum(SIZES.values())
        read_blocks.clear()


def test_prefetch_reads_meanwhile_and_stops_with_the_block(
    folder: Path, read_blocks: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, real = threading.Event(), page_cache.os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        may_read.wait(10)
        return int(real(fd, buffers, offset))

    monkeypatch.setattr(page_cache.os, "preadv", preadv)
    with page_cache.read_ahead(config(folder, "prefetch", prefetch_threads=1)):
        assert read_blocks == []  # weights are copied before anything is read ahead
        threading.Timer(0.1, may_read.set).start()
    assert len(read_blocks) == 1, "what is left is not read behind the block"


@pytest.mark.parametrize("fields", [{"strategy": "lazy"}, {"strategy": "eager", "load_format": "dummy"}])
def test_nothing_is_read_ahead(folder: Path, read_blocks: list[tuple[str, int, int]], fields: dict[str, str]) -> None:
    with page_cache.read_ahead(config(folder, **fields)):
        pass
    assert read_blocks == []


def test_a_file_that_cannot_be_read_is_left_to_the_loader(
    folder: Path, read_blocks: list[tuple[str, int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    real = os.open

    def refuse(path: Any, *args: Any) -> int:
        if str(path).endswith("model-2.safetensors"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_cache.os, "open", refuse)
        with page_cache.read_ahead(config(folder, "eager", prefetch_threads=1)):
            pass
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}/model-2.safetensors is not read ahead: Permission denied"
    ]
