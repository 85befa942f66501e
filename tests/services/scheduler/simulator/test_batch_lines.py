"""Online requests beside a batch: they wait no more steps for their first token, and steps are little longer."""

import random
from collections import Counter

import msgspec
import pytest

from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.trace import TraceRequest
from blockyard.shared.config.services.simulation import CostModel

from .simulations import ROUND, ask, config

STEP_S, SLOTS, TOKENS, SECONDS = 0.02, 32, 32, 12.0
RATE = 0.5 * SLOTS / (TOKENS * STEP_S)
STEPS_ALIKE = msgspec.structs.replace(ROUND, rows_s=((1, STEP_S),), row_s=0.0)


def online(rate: float = RATE, num_prompt: int = 3, num_tokens: int = TOKENS) -> list[TraceRequest]:
    rng, now, found = random.Random(1), 1.0, []
    while (now := now + rng.expovariate(rate)) < SECONDS:
        found.append(ask(now, num_prompt, num_tokens))
    return found


def steps_to_first_token(policy: str, num_lines: int) -> tuple[Counter[int], int]:
    """Steps from arrival to first token, begun ones included, by their number; and the lines that ended."""
    lines = [ask(0.0, 3, TOKENS, batch_line=True) for _ in range(num_lines)]
    more = {"scheduling_policy": policy, "max_num_seqs": SLOTS, "max_queue_len": 2 * num_lines + 100, "depth": None}
    simulation = Simulation(config(STEPS_ALIKE, {"num_blocks": 4000}, **more), lines + online())
    simulation.run(lambda: simulation.now > SECONDS + 2)
    flows = simulation.record.flows
    waited = Counter(-int(-flow.ttft_s // STEP_S) for flow in flows if not flow.request.batch_line)
    return waited, sum(flow.request.batch_line and flow.ended_s is not None for flow in flows)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_online_requests_wait_no_more_steps_beside_a_batch(policy: str) -> None:
    alone, _ = steps_to_first_token(policy, 0)
    beside, num_ended = steps_to_first_token(policy, 1000)
    assert num_ended > 200, "the lines get what is left"
    assert max(beside) == max(alone), (alone, beside)
    assert sum(steps * num for steps, num in beside.items()) <= 1.05 * sum(steps * num for steps, num in alone.items())


def p99_ttft_s(policy: str, num_lines: int) -> float:
    """Of online requests beside lines with prompts of 4,000 tokens, by the cost model of an 8B on one GPU."""
    lines = [ask(0.0, 4000, 50, batch_line=True) for _ in range(num_lines)]
    more = {"scheduling_policy": policy, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "depth": None}
    blocks = {"num_blocks": 55_000, "max_model_len": 8192}
    simulation = Simulation(config(CostModel(), blocks, **more), lines + online(20.0, 200, 200))
    simulation.run(lambda: simulation.now > SECONDS + 2)
    flows = simulation.record.flows
    assert any(flow.ended_s is not None for flow in flows if flow.request.batch_line) == bool(num_lines)
    waits = sorted(flow.ttft_s for flow in flows if not flow.request.batch_line)
    return waits[int(0.99 * len(waits))]


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_long_prompts_of_lines_lengthen_the_steps_of_online_requests_little(policy: str) -> None:
    assert p99_ttft_s(policy, 300) <= 1.2 * p99_ttft_s(policy, 0)
