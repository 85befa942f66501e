"""Rows of the scheduling table that the simulator measures: its own speed, full blocks, fairness, replicas, roles.

python tests/bench/scheduling/bench_simulator.py
"""

import gc
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / ".src"))
sys.path.insert(0, str(Path(__file__).parents[1]))  # for rig

from rig import Row, table

from blockyard.services.bench import datasets
from blockyard.services.bench.workload import due_times
from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.trace import TraceRequest
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.simulation import SimulatedRole, SimulationConfig
from blockyard.shared.messages import KVRole
from blockyard.shared.percentiles import percentile

TIGHT_BLOCKS = 2000  # so few that choices have to give way


def sharegpt(num: int, rate: float, seed: int = 0, tenant: str = "") -> list[TraceRequest]:
    rng = random.Random(seed)
    due = due_times(num, rate, 1.0, rng)
    asks = datasets.sharegpt_requests(num, datasets.RandomIds(0, 1), rng)
    return [
        TraceRequest(arrival_s=at, prompt_tokens=a.num_input, output_tokens=a.num_output, tenant=tenant)
        for at, a in zip(due, asks, strict=True)
    ]


def simulate(
    requests: list[TraceRequest],
    num_workers: int = 1,
    num_blocks: int = 55_000,
    roles: Sequence[SimulatedRole] = (),
    **scheduler: object,
) -> tuple[Simulation, float]:
    """A finished simulation of 8B workers, and the CPU seconds that it took."""
    process = ProcessConfig(name="simulator", bus=BusConfig(registry="ipc://none", bind="ipc://none"))
    config = SimulationConfig(
        process=process,
        scheduler=SchedulerConfig(process=process, served_model_names=["m"], **scheduler),
        trace="",
        num_workers=num_workers,
        roles=list(roles),
        num_blocks=num_blocks,
    )
    simulation = Simulation(config, sorted(requests, key=lambda request: request.arrival_s))
    gc.collect()
    gc.disable()
    began = time.process_time()
    simulation.run()
    spent = time.process_time() - began
    gc.enable()
    return simulation, spent


def ttft_p95(simulation: Simulation, tenant: str) -> float:
    flows = [f for f in simulation.record.flows if f.request.tenant == tenant and f.first_s is not None]
    assert flows, f"nothing of {tenant} was served"
    return percentile(sorted(flow.ttft_s for flow in flows), 95)


def speed_row() -> Row:
    simulation, seconds = simulate(sharegpt(10_000, 20.0))
    assert all(flow.ended_s is not None and not flow.detail for flow in simulation.record.flows)
    text = (
        f"{seconds:.1f} s of CPU ({simulation.record.num_output_tokens:,} tokens out, {simulation.num_events:,} events)"
    )
    return ("simulator, 10,000 requests of ShareGPT-like lengths on one core", text, "60 s")


def roles_row() -> Row:
    """Prompts of 8,192 tokens that keep the prefill workers busy for 90 % of the time."""
    due = due_times(10_000, 1600.0, 1.0, random.Random(0))
    requests = [TraceRequest(arrival_s=at, prompt_tokens=8192, output_tokens=256) for at in due]
    roles = [SimulatedRole(role=KVRole.PREFILL, num_workers=400), SimulatedRole(role=KVRole.DECODE, num_workers=600)]
    simulation, seconds = simulate(requests, roles=roles, max_queue_len=20_000)
    assert all(flow.ended_s is not None and not flow.detail for flow in simulation.record.flows)
    landed = simulation.core.stats().transfers_landed_total
    text = f"{seconds:.1f} s of CPU ({landed:,} transfers landed, {simulation.num_events:,} events)"
    return ("simulator, 10,000 requests of 8,192 tokens, 400 prefill and 600 decode workers, one core", text, "120 s")


def preemption_rows() -> list[Row]:
    simulation, _ = simulate(sharegpt(2500, 42.0), num_blocks=TIGHT_BLOCKS, max_queue_len=10_000)
    first = simulation.record.first_preemption
    assert first is not None, "nobody had to give way"
    used = [(s.used, s.unfilled) for s in simulation.record.samples]
    mean = sum(u * w for u, w in used) / sum(u for u, _ in used)
    return [
        (f"blocks in use at the first preemption, {TIGHT_BLOCKS} of them", f"{first.used:.1%}", "96 %"),
        (
            "slots of used blocks that no token will fill",
            f"{first.unfilled:.2%} then, {mean:.2%} on average",
            "4 %",
        ),
    ]


def fair_rows() -> list[Row]:
    """One tenant sends 100 times as much as the other, and more than there is room for."""
    light, heavy = sharegpt(80, 1.6, 1, "light"), sharegpt(8000, 160.0, 2, "heavy")
    rows: list[Row] = []
    for policy, running, tokens in (
        ("fair", 256, 2048),
        ("fair", 256, 512),
        ("fair", 128, 2048),
        ("fair", 64, 2048),
        ("fair", 64, 256),
        ("fcfs", 256, 2048),
    ):
        alone, flooded = (
            simulate(
                requests,
                scheduling_policy=policy,
                max_num_seqs=running,
                max_num_batched_tokens=tokens,
                max_queue_len=1000,
            )[0]
            for requests in (light, light + heavy)
        )
        before, after, record = ttft_p95(alone, "light"), ttft_p95(flooded, "light"), flooded.record
        text = (
            f"{after / before:.2f} times ({1000 * after:,.0f} ms to {1000 * before:,.0f} ms; "
            f"heavy {1000 * ttft_p95(flooded, 'heavy'):,.0f} ms; all {record.num_output_tokens / flooded.now:,.0f} "
            f"tokens/s out, heavy's p99 ITL {1000 * percentile(sorted(record.gaps['heavy'].gap_s), 99):.0f} ms)"
        )
        what = f"light tenant's p95 TTFT, flooded to alone, {policy}, {running} running, {tokens:,} tokens a step"
        rows.append((what, text, "2 times" if policy == "fair" else "-"))
    return rows


def replica_rows() -> list[Row]:
    """Conversations of 4,000 tokens: how much of them is found, with one cache a worker that knows of no other."""
    rng = random.Random(3)
    kinds = [rng.randrange(64) for _ in range(2000)]
    requests = [
        TraceRequest(
            arrival_s=i / 60, prompt_tokens=4100, output_tokens=100, prefix_group=str(kind), prefix_tokens=4000
        )
        for i, kind in enumerate(kinds)
    ]
    simulation, _ = simulate(requests, num_workers=4)
    found = sum(flow.num_cached_tokens for flow in simulation.record.flows)
    most = (len(requests) - len(set(kinds))) * 4000
    steps = [worker.num_steps for worker in simulation.workers.values()]
    text = f"{found / most:.1%} of what one cache would find; steps {min(steps):,} to {max(steps):,} a worker"
    return [("4 replicas, 64 prefixes of 4,000 tokens, 2,000 requests", text, "as one cache")]


def simulator_rows() -> list[Row]:
    return [speed_row(), roles_row(), *preemption_rows(), *fair_rows(), *replica_rows()]


if __name__ == "__main__":
    print(table(simulator_rows()))
