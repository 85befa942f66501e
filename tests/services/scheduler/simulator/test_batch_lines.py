"""Online requests at half load beside a batch, 20 ms a step: they wait no more steps for their first token."""

import random
from collections import Counter

import msgspec
import pytest

from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.trace import TraceRequest

from .simulations import ROUND, ask, config

STEP_S, SLOTS, TOKENS, SECONDS = 0.02, 32, 32, 12.0
RATE = 0.5 * SLOTS / (TOKENS * STEP_S)
STEPS_ALIKE = msgspec.structs.replace(ROUND, rows_s=((1, STEP_S),), row_s=0.0)


def online() -> list[TraceRequest]:
    rng, now, found = random.Random(1), 1.0, []
    while (now := now + rng.expovariate(RATE)) < SECONDS:
        found.append(ask(now, 3, TOKENS))
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
