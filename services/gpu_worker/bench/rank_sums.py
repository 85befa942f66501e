"""`python -m blockyard.services.gpu_worker.bench.rank_sums RANKS DEVICE BYTES...`: times sums over the ranks of a host.

Each rank is a process that sees a GPU of its own (DEVICE cuda), or computes on the CPU. Rank 0 prints the lines of
`shared.messages.rank_bench`. All ranks make the same calls in the same order, as often as sizes say.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.bench.row import ceilings
from blockyard.services.gpu_worker.bench.timing import replay_ms
from blockyard.services.gpu_worker.layers.fused_ops import find_ops, with_sums
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, RankGroup, connect_cpus, connect_gpus
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.ranks.leader_team import ENVIRONMENT
from blockyard.shared.messages import DeviceRates, SumTime
from blockyard.shared.process import pipes, settings

if torch.cuda.is_available():
    # it imports Triton, which comes only with CUDA builds of torch
    from blockyard.services.gpu_worker.parallel.sums.sum_measurement import choose_sums

MODULE = "blockyard.services.gpu_worker.bench.rank_sums"
HIDDEN, DTYPE = 4096, torch.bfloat16  # of a row
RUNS, WARM_RUNS = 9, 25
RUN_S, LEAST_S, BYTES_PER_S = 2e-3, 1e-5, 390e9  # of a run; of a call, about
MOST_CALLS, HOST_CALLS = 200, 5  # of a run
HOST_READ_BYTES = 64 << 20
CHOICE = "worker's choice"

Call = Callable[[], object]


def main(words: Sequence[str]) -> int:
    """Returns 1 if a rank fails: then all end."""
    size, device, *sizes = words
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(rank) for rank in range(int(size))] if visible is None else visible.split(",")
    num_gpus = len(set(gpus))  # figures of ranks that share one say nothing
    if device == "cuda" and num_gpus < int(size):
        print(f"{size} ranks need a GPU each, and there are {num_gpus}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, size, device, *sizes, "--rank", str(rank), folder],
                env={**os.environ, **ENVIRONMENT, **({"CUDA_VISIBLE_DEVICES": gpus[rank]} if device == "cuda" else {})},
            )
            for rank in range(int(size))
        ]
        try:
            while (codes := [one.poll() for one in ranks]).count(0) < len(codes):
                if any(codes):
                    return 1
                time.sleep(0.05)
        finally:
            for one in ranks:
                one.kill()
                one.wait()
    return 0


class RankDevice(Protocol):
    device: torch.device

    def transports(self, shard: Shard, folder: Path) -> dict[str, RankGroup]:
        """Connects the ranks by all that can add their parts here, by name."""

    def rates(self) -> DeviceRates: ...

    def seconds(self, call: Call, num_bytes: int) -> float:
        """Returns seconds for each call. num_bytes: of a part."""


class GpuRank:
    """Implements `RankDevice`."""

    device = torch.device("cuda", 0)

    def transports(self, shard: Shard, folder: Path) -> dict[str, RankGroup]:
        stores = GroupStores(Meeting(folder))
        found = {name: connect_gpus(shard, stores, name, self.device) for name in ("NCCL", CHOICE)}
        with torch.inference_mode():
            found[CHOICE].kernels = choose_sums(
                *(found[CHOICE], stores.folder_of(CHOICE), HIDDEN, DTYPE),
                _note if shard.rank == 0 else lambda line: None,
                in_order=False,
            )
        return found

    def rates(self) -> DeviceRates:
        return DeviceRates(torch.cuda.get_device_name(self.device), ceilings().read_bytes_per_s)

    def seconds(self, call: Call, num_bytes: int) -> float:
        """The median of several replays of a graph of many calls."""
        num = max(min(int(RUN_S / (num_bytes / BYTES_PER_S + LEAST_S)), MOST_CALLS), 1)
        for _ in range(2):  # compiles, connects ranks and allocates outside of the graph
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(num):
                call()
        for _ in range(WARM_RUNS):
            graph.replay()
        return statistics.median(replay_ms(graph) for _ in range(RUNS)) / 1e3 / num


class CpuRank:
    """Implements `RankDevice`."""

    device = torch.device("cpu")

    def transports(self, shard: Shard, folder: Path) -> dict[str, RankGroup]:
        return {"gloo": connect_cpus(shard, GroupStores(Meeting(folder)), "gloo")}

    def rates(self) -> DeviceRates:
        source = torch.ones(HOST_READ_BYTES // 4)
        return DeviceRates("CPU", source.nbytes / self.seconds(source.sum, source.nbytes))

    def seconds(self, call: Call, num_bytes: int) -> float:
        """The fastest of a few calls, which the host waits for."""
        call()
        took_s = []
        for _ in range(HOST_CALLS):
            start = time.perf_counter()
            call()
            took_s.append(time.perf_counter() - start)
        return min(took_s)


DEVICES: dict[str, Callable[[], RankDevice]] = {"cuda": GpuRank, "cpu": CpuRank}


def run_rank(shard: Shard, folder: Path, rank: RankDevice, sizes: Sequence[int]) -> None:
    groups = rank.transports(shard, folder)
    if shard.rank == 0:
        _tell(rank.rates())
    ops, norm = find_ops(rank.device), RMSNorm(torch.ones(HIDDEN, dtype=DTYPE, device=rank.device), 1e-5)
    norm.prepare()
    with torch.inference_mode():
        for num_bytes in sizes:
            rows = max(num_bytes // (HIDDEN * DTYPE.itemsize), 1)
            residual, part = torch.zeros(2, rows, HIDDEN, dtype=DTYPE, device=rank.device)
            for name, group in groups.items():
                summed = with_sums(ops, group)
                calls = (partial(group.sum, part), partial(summed.add_norm, residual, part, norm))
                alone_s, normed_s = (rank.seconds(call, part.nbytes) for call in calls)
                if shard.rank == 0:
                    _tell(SumTime(name, part.nbytes, alone_s, normed_s))


def _note(line: str) -> None:
    print(line, file=sys.stderr)


def _tell(line: DeviceRates | SumTime) -> None:
    print(msgspec.json.encode(line).decode(), flush=True)


def _main_of_rank(words: Sequence[str]) -> int:
    """words: those of `main`, --rank, the rank's number, and a folder of all ranks."""
    size, device, *sizes, _, rank, folder = words
    settings.die_with(os.getppid())
    run_rank(Shard(int(rank), int(size)), Path(folder), DEVICES[device](), [int(one) for one in sizes])
    return 0


if __name__ == "__main__":
    run = _main_of_rank if "--rank" in sys.argv else main
    settings.end(pipes.exit_code_of(lambda: run(sys.argv[1:])))
