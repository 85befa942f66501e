"""Sums over ranks on GPUs of one host, checked and timed beside NCCL and torch's symmetric memory.

`bench_all_reduce.py [--ranks 2] [--limit SECONDS] [--checks N] [--no-times]`. Ranks share GPUs if there are fewer: then
NCCL is left out, and a sum takes as long as the driver takes to switch between processes. Times are microseconds per
call in a chain of calls in a CUDA graph, the median of its replays on rank 0.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from blockyard.kernels.all_reduce.peer_buffers import PeerBuffers
from blockyard.kernels.all_reduce.references import sum_add_rms_norm_reference, sum_ranks_reference
from blockyard.kernels.all_reduce.row_tiles import RowTiles, flat_tiles, norm_tiles
from blockyard.kernels.all_reduce.sum_ranks import fits, sum_add_rms_norm, sum_ranks
from blockyard.kernels.int_math import ceil_div
from blockyard.kernels.layers.add_rms_norm import add_rms_norm
from blockyard.services.gpu_worker.parallel.meeting import Meeting
from blockyard.services.gpu_worker.parallel.peer_memory import PeerMemory
from blockyard.services.gpu_worker.parallel.rank_group import GroupStores, connect_cpus, connect_gpus
from blockyard.services.gpu_worker.parallel.shares import Shard
from blockyard.services.gpu_worker.parallel.sums.peer_sums import SymmetricSums

HIDDEN, EPS, DTYPE = 8192, 1e-5, torch.bfloat16
KIB = 1024
SIZES = [KIB << n for n in (4, 5, 6, 8, 9, 10, 11, 12, 14, 16)]  # 16 KiB to 64 MiB
HALF_BYTES = 256 << 20
FLAT = [(1024, 2), (2048, 2), (2048, 4), (4096, 4), (4096, 8)]  # tile, warps
NORM_WARPS = (8, 16)
PROGRAMS = (66, 132, 264, 396)
LEADS = (1, 4)
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "NCCL_SOCKET_IFNAME": "lo",
}
Call = Callable[[], object]
Variant = tuple[str, RowTiles]  # and its name


class Rank:
    """One rank's process."""

    def __init__(self, rank: int, size: int, folder: Path, limit_s: float, num_checks: int) -> None:
        self.rank, self.size, self.num_checks = rank, size, num_checks
        self.ends = time.monotonic() + limit_s
        num_gpus = torch.cuda.device_count()
        self.shared = num_gpus < size
        self.device = torch.device("cuda", rank % num_gpus)
        torch.cuda.set_device(self.device)
        (folder / "symmetric").mkdir(exist_ok=True)
        self.folder, stores = folder, GroupStores(Meeting(folder))
        self.hosts = connect_cpus(Shard(rank, size), stores, "cpu")
        self.nccl = None if self.shared else connect_gpus(Shard(rank, size), stores, "gpu", self.device)
        self.memory = PeerMemory(self.hosts, self.device, HALF_BYTES)
        self.buffers: PeerBuffers = self.memory.buffers
        self.calls, self.replays = (2, 3) if self.shared else (20, 15)
        self.found: dict[str, float] = {}

    def say(self, *what: object) -> None:
        if self.rank == 0:
            print(*what, flush=True)

    def has_time(self) -> bool:
        return bool(self.hosts.least(int(time.monotonic() < self.ends)))

    def parts(self, rows: int, seed: int, cols: int = HIDDEN, dtype: torch.dtype = DTYPE) -> list[Tensor]:
        """The parts of all ranks, the same in each."""
        numbers = torch.Generator(self.device).manual_seed(seed)
        return [torch.randn(rows, cols, generator=numbers, device=self.device).to(dtype) for _ in range(self.size)]

    def time(self, call: Call, num_bytes: int) -> float:
        """Returns microseconds per call."""
        calls = self.calls if num_bytes < 8 << 20 else 4
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
        self.hosts.least(0)
        times = []
        for _ in range(self.replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        return median(1e3 * start.elapsed_time(end) / calls for start, end in times[2 if self.replays > 5 else 0 :])


def flat_variants(rank: Rank, part: Tensor, out: Tensor) -> Iterator[Variant]:
    plain = flat_tiles(part, out)
    if rank.shared:
        yield "plain", plain
        return
    for tile, warps in FLAT:
        num_rows = ceil_div(part.numel(), tile)
        for programs, lead in programs_of(num_rows):
            yield (
                f"{tile}/{warps}w/{programs}p/{lead}",
                replace(plain, num_rows=num_rows, size=tile, tile=tile, programs=programs, num_warps=warps, lead=lead),
            )


def norm_variants(rank: Rank, residual: Tensor, weight: Tensor, out: Tensor) -> Iterator[Variant]:
    plain = norm_tiles(residual, residual, weight, out, EPS)
    if rank.shared:
        yield "plain", plain
        return
    for warps in NORM_WARPS:
        for programs, lead in programs_of(len(residual)):
            yield f"{warps}w/{programs}p/{lead}", replace(plain, programs=programs, num_warps=warps, lead=lead)


def programs_of(num_rows: int) -> list[tuple[int, int]]:
    """Programs and their lead."""
    if num_rows <= PROGRAMS[0]:
        return [(num_rows, 1)]
    some = {min(num_rows, most) for most in PROGRAMS}
    return [(programs, lead) for programs in sorted(some) for lead in (LEADS if programs < num_rows else LEADS[:1])]


def check(rank: Rank) -> None:
    """Compares with the reference, to the bit."""
    alike, dtypes = True, (torch.bfloat16, torch.float16, torch.float32)
    for seed, (rows, cols) in enumerate([(1, 8192), (7, 2880), (1000, 8192)]):
        for dtype in dtypes if cols == 2880 else dtypes[:1]:
            parts = rank.parts(rows, seed, cols, dtype)
            [residual] = rank.parts(rows, 99, cols, dtype)[:1]
            weight = parts[0][0].abs() + 0.5
            for two_steps in (False, True):
                total = sum_ranks(parts[rank.rank], rank.buffers, two_steps)
                assert torch.equal(total, sum_ranks_reference(parts)), (rows, cols, dtype, two_steps)
                own = residual.clone()
                normed = sum_add_rms_norm(parts[rank.rank], own, weight, EPS, rank.buffers, None, two_steps)
                added, expected = sum_add_rms_norm_reference(parts, residual, weight, EPS)
                assert torch.equal(own, added), (rows, cols, dtype, two_steps)
                torch.testing.assert_close(normed, expected, rtol=2e-2, atol=2e-2)
                alike &= torch.equal(normed, add_rms_norm(residual.clone(), total, weight, EPS))
    rank.memory.check()
    rank.say(f"all checks of one and two steps passed; the bits of add_rms_norm: {alike}")


def check_delayed(rank: Rank) -> None:
    """Sums of several sizes in turn, with a delay of the host or of the GPU before some."""
    numbers, began = random.Random(rank.rank), time.monotonic()
    shapes = [(1, 4096), (2, 8192), (33, 4096)] + ([] if rank.shared else [(200, 8192)])
    inputs = [rank.parts(rows, 7 + rows, cols) for rows, cols in shapes]
    expected = [sum_ranks_reference(parts) for parts in inputs]
    wrong = torch.zeros((), dtype=torch.int64, device=rank.device)
    order, done = random.Random(5), 0
    while done < rank.num_checks:
        for _ in range(100):
            which, two_steps = order.randrange(len(inputs)), order.random() < 0.3
            if numbers.random() < 0.05:
                torch.cuda._sleep(int(numbers.random() * 100_000))
            if numbers.random() < 0.02:
                time.sleep(numbers.random() * 1e-3)
            total = sum_ranks(inputs[which][rank.rank], rank.buffers, two_steps)
            wrong += (total != expected[which]).any()
        done += 100
        if not rank.has_time():
            break
    torch.cuda.synchronize()
    rank.memory.check()
    assert not wrong.item(), f"{wrong.item()} of {done} sums are wrong"
    rank.say(f"{done} sums under random delays: equal to the reference, {time.monotonic() - began:.1f} s")


def measure(rank: Rank) -> None:
    try:
        symmetric = None
        if not rank.shared:
            folder = rank.folder / "symmetric"
            symmetric = SymmetricSums(Shard(rank.rank, rank.size), folder, rank.device, SIZES[-1])
    except Exception as e:  # noqa: BLE001 - it is only compared with
        symmetric = None
        print("no symmetric memory:", str(e).splitlines()[0], flush=True)
    for num_bytes in SIZES if not rank.shared else SIZES[:6]:
        if not rank.has_time():
            rank.say("out of time")
            return
        measure_size(rank, num_bytes, symmetric)
    rank.memory.check()


def measure_size(rank: Rank, num_bytes: int, symmetric: SymmetricSums | None) -> None:
    rows = num_bytes // (2 * HIDDEN)
    part, out = rank.parts(rows, 1)[rank.rank], torch.empty(rows, HIDDEN, dtype=DTYPE, device=rank.device)
    residual, weight = torch.zeros_like(part), torch.ones(HIDDEN, dtype=DTYPE, device=rank.device)
    own: dict[str, float] = {}
    normed: dict[str, float] = {}

    def time_own(two_steps: bool, flat: Iterator[Variant], norm: Iterator[Variant]) -> None:
        mark = "2:" if two_steps else ""
        for name, tiles in flat:
            call = partial(sum_ranks, part, rank.buffers, two_steps, tiles)
            own[mark + name] = rank.time(call, num_bytes)
        for name, tiles in norm:
            call = partial(sum_add_rms_norm, part, residual, weight, EPS, rank.buffers, None, two_steps, tiles)
            normed[mark + name] = rank.time(call, num_bytes)

    time_own(False, flat_variants(rank, part, out), norm_variants(rank, residual, weight, out))
    if num_bytes >= 1 << 20 and not rank.shared and fits(rows, 2 * HIDDEN, rank.buffers, two_steps=True):
        flat = (one for one in flat_variants(rank, part, out) if one[1].tile == 4096)
        time_own(True, flat, (one for one in norm_variants(rank, residual, weight, out) if one[1].num_warps == 16))
    rest = {"norm": rank.time(partial(add_rms_norm, residual, part, weight, EPS), num_bytes)}
    nccl = rank.nccl
    if nccl is not None:
        copy = torch.zeros_like(part)
        rest["nccl"] = rank.time(partial(nccl.sum, copy), num_bytes)
        rest["nccl + norm"] = rank.time(lambda: add_rms_norm(residual, nccl.sum(copy), weight, EPS), num_bytes)
    if symmetric is not None:
        rest["torch symmetric, with a copy"] = rank.time(partial(symmetric.sum, part), num_bytes)
    report(rank, num_bytes, own, normed, rest)


def report(rank: Rank, num_bytes: int, own: dict[str, float], normed: dict[str, float], rest: dict[str, float]) -> None:
    def best(of: dict[str, float]) -> str:
        some = sorted(of, key=of.__getitem__)[:2]
        return ", ".join(f"{of[name]:.1f} ({name})" for name in some)

    others = ", ".join(f"{name} {value:.1f}" for name, value in rest.items())
    rank.say(f"{num_bytes // KIB:6d} KiB: sum {best(own)}; with norm {best(normed)}; {others}")
    folder = os.environ.get("OUT")
    if folder and rank.rank == 0:
        with (Path(folder) / "all_reduce.jsonl").open("a") as file:
            file.write(json.dumps({"bytes": num_bytes, "sum": own, "norm": normed, "rest": rest}) + "\n")


def run_rank(rank: int, size: int, folder: Path, limit_s: float, num_checks: int, times: bool) -> None:
    own = Rank(rank, size, folder, limit_s, num_checks)
    name, num_gpus = torch.cuda.get_device_name(own.device), torch.cuda.device_count()
    own.say(f"{size} ranks, {num_gpus} x {name}, torch {torch.__version__}")
    with torch.inference_mode():
        check(own)
        if times:
            measure(own)
        check_delayed(own)
    own.hosts.least(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which nothing more is begun")
    parser.add_argument("--checks", type=int, default=20_000, help="sums under random delays")
    parser.add_argument("--no-times", action="store_true")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    spawn, options = multiprocessing.get_context("spawn"), (args.limit, args.checks, not args.no_times)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            spawn.Process(target=run_rank, args=(rank, args.ranks, Path(folder), *options))
            for rank in range(args.ranks)
        ]
        for one in ranks:
            one.start()
        ends = time.monotonic() + args.limit + 20
        while any(one.is_alive() for one in ranks) and all(one.exitcode in (None, 0) for one in ranks):
            if time.monotonic() > ends:
                print("killed at the limit", flush=True)
                break
            time.sleep(0.1)
        time.sleep(1.0)
        for one in ranks:
            one.kill()
            one.join()
    return max(abs(one.exitcode or 0) for one in ranks)


if __name__ == "__main__":
    sys.exit(main())
