"""Simulations for tests: settings with a round cost model, requests, and a run that checks the blocks at its end."""

from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.trace import TraceRequest
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.simulation import CostModel, SimulationConfig

# 10 ms a step, 1 ms a row beyond the first, frames take no time
ROUND = CostModel(rows_s=((1, 0.01),), row_s=0.001, context_token_s=0.0, pair_s=0.0, hop_s=0.0, turn_s=0.0)


def config(cost: CostModel = ROUND, more: dict[str, object] | None = None, **scheduler: object) -> SimulationConfig:
    process = ProcessConfig(name="simulator", bus=BusConfig(registry="ipc://none", bind="ipc://none"))
    settings: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "depth": 0, **scheduler}
    made = SchedulerConfig(process=process, served_model_names=["m"], **settings)
    return SimulationConfig(
        process=process, scheduler=made, trace="t.jsonl", cost=cost, **({"num_blocks": 100} | (more or {}))
    )


def ask(at: float, prompt: int, output: int, **more: object) -> TraceRequest:
    return TraceRequest(arrival_s=at, prompt_tokens=prompt, output_tokens=output, **more)


def simulate(settings: SimulationConfig, *requests: TraceRequest) -> Simulation:
    simulation = Simulation(settings, requests)
    simulation.run()
    for group in simulation.core.groups.values():
        assert (
            not group.running
            and group.kv_cache.blocks.num_free + group.kv_cache.blocks.num_pending == group.kv_cache.blocks.num_ids
        )
    return simulation
