"""What prefill and decode workers buy, by the simulator's cost model: goodput of two GPUs, unified and apart.

python tests/bench/scheduling/bench_goodput.py

8,192 tokens in and 256 out (and 2,048 / 512), 160 requests, Poisson, p99 of TTFT at most 1 s. Unified workers have the
step size that serves most.
"""

import gc
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

from rig import Row, table

from blockyard.services.bench.workload import due_times
from blockyard.services.scheduler.simulator.goodput import GoodputSearch, splits, unified
from blockyard.services.scheduler.simulator.trace import TraceRequest
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.simulation import LatencyLimits, SimulationConfig

NUM_REQUESTS, TTFT_MS = 160, 1000.0
LOADS = ((8192, 256, 8.0, "1.8"), (8192, 256, 10.0, "1.1"), (8192, 256, 20.0, "0.6"), (2048, 512, 10.0, "1.0"))


def poisson(num_input: int, num_output: int, rate: float = 2.0, seed: int = 0) -> list[TraceRequest]:
    return [
        TraceRequest(arrival_s=at, prompt_tokens=num_input, output_tokens=num_output)
        for at in due_times(NUM_REQUESTS, rate, 1.0, random.Random(seed))
    ]


def goodput_row(num_input: int, num_output: int, itl_ms: float, expected: str) -> Row:
    process = ProcessConfig(name="simulator", bus=BusConfig(registry="ipc://none", bind="ipc://none"))
    scheduler = SchedulerConfig(process=process, served_model_names=["m"])
    config = SimulationConfig(process=process, scheduler=scheduler, trace="", num_workers=2)
    search = GoodputSearch(config, poisson(num_input, num_output), LatencyLimits(ttft_ms=TTFT_MS, itl_ms=itl_ms))
    apart, together = search.best(*splits(config)), search.best(*unified(config))
    text = (
        f"{apart.per_s / together.per_s:.2f} ({apart.per_s:.2f} to {together.per_s:.2f} requests a second, "
        f"{together.setup.name})"
    )
    what = f"{num_input:,} in, {num_output} out, p99 of ITL at most {itl_ms:g} ms: 1 prefill + 1 decode to 2 unified"
    return (what, text, expected)


def goodput_rows() -> list[Row]:
    gc.disable()
    return [goodput_row(*load) for load in LOADS]


if __name__ == "__main__":
    print(table(goodput_rows()))
