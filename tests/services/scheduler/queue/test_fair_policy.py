"""Time to first token of a tenant with little load while another tenant floods the server."""

import random

import pytest

from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.trace import TraceRequest
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.simulation import SimulationConfig

SECONDS, RATE, FLOOD = 12.0, 2.0, 100


def load(tenant: str, rate: float, seed: int) -> list[TraceRequest]:
    """Lengths as in chats."""
    rng, now, requests = random.Random(seed), 0.0, []
    while (now := now + rng.expovariate(rate)) < SECONDS:
        prompt = min(2000, max(4, int(rng.lognormvariate(4.8, 1.1))))
        output = min(600, max(2, int(rng.lognormvariate(4.6, 0.9))))
        requests.append(TraceRequest(arrival_s=now, prompt_tokens=prompt, output_tokens=output, tenant=tenant))
    return requests


def p95_s(requests: list[TraceRequest], **settings: object) -> float:
    process = ProcessConfig(name="simulator", bus=BusConfig(registry="ipc://none", bind="ipc://none"))
    scheduler = SchedulerConfig(
        process=process, served_model_names=["m"], scheduling_policy="fair", max_queue_len=400, **settings
    )
    requests = sorted(requests, key=lambda request: request.arrival_s)
    simulation = Simulation(SimulationConfig(process=process, scheduler=scheduler, trace=""), requests)
    simulation.run()
    light = [flow for flow in simulation.record.flows if flow.request.tenant == "light"]
    assert all(flow.first_s is not None for flow in light), "none of them was refused"
    return sorted(flow.ttft_s for flow in light)[int(0.95 * len(light))]


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_seqs": 64, "max_num_batched_tokens": 256}], ids=["default", "small"]
)
def test_a_flood_of_a_hundred_times_the_load_at_most_doubles_the_wait(settings: dict[str, int]) -> None:
    light, heavy = load("light", RATE, 1), load("heavy", RATE * FLOOD, 2)
    alone = p95_s(light, **settings)
    assert p95_s(light + heavy, **settings) <= 2 * alone
