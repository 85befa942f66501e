"""Runs the worker's benchmark of sums over ranks, which loads torch, in processes of its own."""

import subprocess
import sys
from collections.abc import Sequence

import msgspec

from blockyard.services.bench.load.results import BenchError
from blockyard.shared.messages import DeviceRates, RankBenchLine, SumTime

MODULE = "blockyard.services.gpu_worker.bench.rank_sums"
TAIL = 1000  # characters of a failed benchmark's output that are shown


def measure(
    num_ranks: int, sizes: Sequence[int], limit_s: float, *, on_gpus: bool
) -> tuple[DeviceRates, list[SumTime]]:
    """Times sums of parts of `sizes` bytes. Raises BenchError."""
    device = "cuda" if on_gpus else "cpu"
    command = [sys.executable, "-P", "-m", MODULE, str(num_ranks), device, *map(str, sizes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise BenchError(f"the sums over {num_ranks} ranks took longer than {limit_s:.0f} s") from None
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or not lines:
        raise BenchError(f"the sums over {num_ranks} ranks could not be measured: {done.stderr.strip()[-TAIL:]}")
    print(done.stderr, end="", file=sys.stderr, flush=True)  # how ranks sum
    rates, *times = (msgspec.json.decode(line, type=RankBenchLine) for line in lines)
    if not isinstance(rates, DeviceRates):
        raise BenchError(f"the benchmark of sums began with {lines[0]}")
    return rates, [one for one in times if isinstance(one, SumTime)]
