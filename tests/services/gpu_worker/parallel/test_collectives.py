"""Ranks that share a GPU: they notice it, and exchange through host memory, or by kernels. Ranks are threads here."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_ranks import exchange, replay_in_graphs, run_processes
from rank_group import Group, config
from tiny_models import BY_NAME

from blockyard.services.gpu_worker.parallel import peer_collectives
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.peer_collectives import exchange_on_gpu
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup, connect_gpus
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.startup import cpu
from blockyard.services.gpu_worker.startup.cpu import CpuBackend
from blockyard.services.gpu_worker.startup.rank_connection import BY_HOST, SHARED_GPU
from blockyard.shared.config.services.worker import WorkerConfig

CPU = torch.device("cpu")


def connect(folder: Path, size: int, work: Callable[[RankGroup], Any]) -> list[Any]:
    """Returns what each rank returns."""

    def run(rank: int) -> Any:
        return work(connect_gpus(Shard(rank, size), GroupStores(Meeting(folder)), "ranks", CPU))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="of all"))


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_a_gpu_exchange_through_the_host(size: int, tmp_path: Path) -> None:
    connect(tmp_path, size, exchange)


@pytest.mark.parametrize(("gpus", "shares"), [(["a", "b", "c"], False), (["a", "b", "a"], True)])
def test_nccl_is_for_ranks_with_a_gpu_each(
    gpus: list[str], shares: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, made = list(gpus), list[int]()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=left.pop()))

    class OfGpus:
        Options = SimpleNamespace

        def __init__(self, store: object, rank: int, size: int, options: SimpleNamespace) -> None:
            made.append(rank)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", OfGpus, raising=False)

    def stay(group: RankGroup) -> bool:
        """Until all are connected."""
        return group.least(0) == 0 if group.shares_gpu else False

    assert connect(tmp_path, 3, stay) == [shares] * 3
    assert sorted(made) == ([] if shares else [0, 1, 2])


def test_a_start_says_that_ranks_share_a_gpu_and_has_no_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settled, notes = list[WorkerConfig](), list[str]()
    start_steps, connect_cpus = CpuBackend.start_steps, cpu.connect_cpus

    def shared(*args: Any) -> RankGroup:
        group = connect_cpus(*args)
        group.shares_gpu = True
        return group

    def start(self: CpuBackend, runner: Any, config: WorkerConfig, report: Any) -> None:
        settled.append(config)
        start_steps(self, runner, config, report)
        report.phase("over")

    monkeypatch.setattr(cpu, "connect_cpus", shared)
    monkeypatch.setattr(CpuBackend, "start_steps", start)
    BY_NAME["llama"].save(tmp_path / "model")
    made = Group(config(tmp_path / "model"), tmp_path, lambda phase, done, said: notes.extend(said))
    try:
        made.start()
    finally:
        made.team.close()
    assert {SHARED_GPU, BY_HOST} <= set(notes)
    assert [one.enforce_eager for one in settled] == [True]


class SumsOfThreads:
    """Sums as `sum_ranks`: a thread waits for the other one's part."""

    def __init__(self) -> None:
        self._parts: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(2, timeout=10)

    def __call__(self, part: torch.Tensor, buffers: Any) -> torch.Tensor:
        assert part.nbytes <= buffers.one_step_bytes()
        self._parts[buffers.rank] = part
        self._barrier.wait()
        total = self._parts[0] + self._parts[1]
        self._barrier.wait()
        return total


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("most_bytes", [64, 1 << 20])
def test_two_ranks_exchange_by_sums(most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several parts, where they are larger than the buffers."""

    def memory(group: RankGroup, device: torch.device, half_bytes: int) -> Any:
        buffers = SimpleNamespace(rank=group.rank, size=2, one_step_bytes=lambda: most_bytes)
        return SimpleNamespace(buffers=buffers, check=lambda: None)

    def run(group: RankGroup) -> None:
        by_kernels = exchange_on_gpu(group)
        assert not by_kernels.host_waits
        exchange(by_kernels)

    monkeypatch.setattr(peer_collectives, "PeerMemory", memory)
    monkeypatch.setattr(peer_collectives, "sum_ranks", SumsOfThreads())
    connect(tmp_path, 2, run)


@pytest.mark.usefixtures("one_gpu")
def test_without_mapped_memory_the_host_carries_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("not supported")

    monkeypatch.setattr(peer_collectives, "PeerMemory", refuse)
    assert connect(tmp_path, 2, lambda group: exchange_on_gpu(group).host_waits) == [True] * 2


@pytest.mark.cuda
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_kernels_exchange_in_cuda_graphs(tmp_path: Path) -> None:
    run_processes(replay_in_graphs, [(rank, tmp_path) for rank in range(2)])
