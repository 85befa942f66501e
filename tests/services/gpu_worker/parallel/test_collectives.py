"""Ranks that share a GPU: they notice it, and exchange through host memory. Ranks are threads here."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_group import Group, config
from tiny_models import BY_NAME

from blockyard.services.gpu_worker.parallel import rank_group
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup, connect_gpus
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.startup import cpu
from blockyard.services.gpu_worker.startup.cpu import CpuBackend
from blockyard.services.gpu_worker.startup.rank_connection import SHARED_GPU
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
    def exchange(group: RankGroup) -> None:
        assert group.shares_gpu and group.host_waits
        own = torch.arange(6.0).view(2, 3) + 10 * group.rank
        parts = [torch.arange(6.0).view(2, 3) + 10 * rank for rank in range(size)]
        assert all(map(torch.equal, group.collect(own), parts))
        assert torch.equal(group.sum(own.clone()), sum(parts[1:], parts[0]))
        joined = group.join_columns(own[:, group.rank :], [3 - rank for rank in range(size)])
        if group.is_leader:
            assert torch.equal(joined, torch.cat([part[:, rank:] for rank, part in enumerate(parts)], 1))
        told = torch.full((3,), group.rank + 5)
        group.copy_from_leader(told)
        assert told.tolist() == [5] * 3
        assert group.least(7 - group.rank) == 8 - size
        if group.rank == 0:
            sent = own.to(torch.bfloat16)
            group.wait(group.send(sent, 1))
            assert torch.equal(sent, own.to(torch.bfloat16))
        elif group.rank == 1:
            got = torch.empty(2, 3, dtype=torch.bfloat16)
            group.receive(got, 0)
            assert torch.equal(got, parts[0].to(torch.bfloat16))
        group.least(0)

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

    monkeypatch.setattr(rank_group._dist, "ProcessGroupNCCL", OfGpus, raising=False)
    assert connect(tmp_path, 3, lambda group: group.shares_gpu) == [shares] * 3
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
    assert SHARED_GPU in notes
    assert [one.enforce_eager for one in settled] == [True]
