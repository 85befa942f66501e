"""What the processes of ranks that share a GPU do in tests."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from blockyard.kernels.all_reduce.references import sum_add_rms_norm_reference, sum_ranks_reference
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.peer_collectives import exchange_on_gpu
from blockyard.services.gpu_worker.parallel.peer_memory import PeerMemory
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup, connect_cpus, connect_gpus
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.sums.peer_sums import PeerSums, SymmetricSums
from blockyard.services.gpu_worker.parallel.sums.sum_table import SumWay, same_way

END_S, EPS = 60.0, 1e-5


def run_processes(target: Callable[..., None], arguments: Sequence[tuple[object, ...]]) -> None:
    """Raises AssertionError unless all end well in time. arguments: of each process."""
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=target, args=some) for some in arguments]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(END_S)
        one.kill()
    assert [one.exitcode for one in ranks] == [0] * len(ranks)


def exchange(group: RankGroup) -> None:
    """Calls all methods."""
    size = group.size
    assert group.shares_gpu
    parts = [torch.arange(6.0, device=group.device).view(2, 3) + 10 * rank for rank in range(size)]
    own = parts[group.rank]
    assert all(map(torch.equal, group.collect(own), parts))
    assert torch.equal(group.sum(own.clone()), sum(parts[1:], parts[0]))
    assert torch.equal(group.gather(own), torch.stack(parts))
    for_ranks = [torch.stack([part + to for to in range(size)]) for part in parts]
    assert torch.equal(group.sum_own(for_ranks[group.rank]), sum(parts) + size * group.rank)
    joined = group.join_columns(own[:, group.rank :], [3 - rank for rank in range(size)])
    if group.is_leader:
        assert torch.equal(joined, torch.cat([part[:, rank:] for rank, part in enumerate(parts)], 1))
    told = torch.full((3,), group.rank + 5, device=group.device)
    group.copy_from_leader(told)
    assert told.tolist() == [5] * 3
    assert group.least(7 - group.rank) == 8 - size
    if group.rank == 0:
        sent = own.to(torch.bfloat16)
        group.wait(group.send(sent, 1))
        assert torch.equal(sent, own.to(torch.bfloat16))
    elif group.rank == 1:
        got = torch.empty(2, 3, dtype=torch.bfloat16, device=group.device)
        group.receive(got, 0)
        assert torch.equal(got, parts[0].to(torch.bfloat16))
    group.least(0)


def sum_by_kernels(rank: int, size: int, folder: Path) -> None:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = connect_cpus(Shard(rank, size), GroupStores(Meeting(folder)), "ranks")
    memory = PeerMemory(group, device, 1 << 22)
    numbers = torch.Generator(device).manual_seed(3)
    for rows, cols in ((1, 4096), (7, 2880), (33, 8192)):
        parts = torch.randn(size, rows, cols, generator=numbers, device=device).bfloat16()
        residual, weight = parts[0] * 2, parts[1][0].abs()
        for way in (SumWay.ONE_STEP, SumWay.TWO_STEPS):
            kernels = PeerSums(memory, None, same_way(way, 1 << 22))
            total = kernels.sum(parts[rank].clone())
            assert total is not None
            assert torch.equal(total, sum_ranks_reference(list(parts)))
            own = residual.clone()
            normed = kernels.sum_add_rms_norm(parts[rank], own, weight, EPS)
            added, wanted = sum_add_rms_norm_reference(list(parts), residual, weight, EPS)
            assert torch.equal(own, added)
            torch.testing.assert_close(normed, wanted, rtol=2e-2, atol=2e-2)
    kernels.check()
    group.least(0)
    os._exit(0)  # the memory of others may still be mapped


def replay_in_graphs(rank: int, folder: Path) -> None:
    device = torch.device("cuda", 0)
    group = exchange_on_gpu(connect_gpus(Shard(rank, 2), GroupStores(Meeting(folder)), "ranks", device))
    assert not group.host_waits
    exchange(group)
    own = torch.zeros(4, 6, device=device)

    def step() -> list[torch.Tensor]:
        told = own.clone()
        group.copy_from_leader(told)
        joined = group.join_columns(own, [6, 6])
        return [group.sum(own.clone()), told, joined[:, -6:] if group.is_leader else own * 2]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = step()
    for factor in (1, 2, 3):
        own.fill_(factor * (rank + 1))
        graph.replay()
        assert [one.unique().tolist() for one in outputs] == [[factor * 3], [factor], [factor * (2 + 2 * rank)]]
    group.least(0)
    os._exit(0)  # the memory of others may still be mapped


def sum_in_symmetric_memory(rank: int, folder: Path) -> None:
    device = torch.device("cuda", 0)
    group = connect_cpus(Shard(rank, 2), GroupStores(Meeting(folder)), "ranks")
    sums = SymmetricSums(Shard(rank, 2), folder, device, 1 << 20)
    for rows in (1, 33):
        parts = torch.randn(2, rows, 4096, generator=torch.Generator().manual_seed(rows)).bfloat16()
        total = sums.sum(parts[rank].to(device))
        torch.testing.assert_close(total.cpu(), sum_ranks_reference(list(parts)), rtol=2e-2, atol=2e-2)
    group.least(0)
    os._exit(0)
