"""Retry-After is close to the real wait, in virtual time and under several loads."""

import random
from collections.abc import Callable

import pytest

from blockyard.services.scheduler.queue.output_lengths import OutputLengths
from blockyard.services.scheduler.simulator.simulation import Simulation
from blockyard.services.scheduler.simulator.trace import TraceRequest
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.scheduler import SchedulerConfig
from blockyard.shared.config.services.simulation import CostModel, SimulationConfig
from blockyard.shared.messages import Generate, SchedulerIn

COST = CostModel(rows_s=((1, 0.02), (32, 0.03)), row_s=50e-6, context_token_s=200e-9, pair_s=0.0, hop_s=0.0)
WARM_S = 1.0  # after the first request; before, nothing has been measured
WORST, FEW_S = 2.0, 4.0  # 99 of 100 estimates are within this factor or this many seconds
USUAL = 1.5  # nine of ten are within this factor or this many seconds
LONG_S = 3.0  # seconds; factors are printed for longer waits


def ask(at: float, prompt: int, output: int, **more: object) -> TraceRequest:
    return TraceRequest(arrival_s=at, prompt_tokens=prompt, output_tokens=output, **more)


def arrivals(rate: float, seconds: float, make: Callable[[random.Random, float], TraceRequest]) -> list[TraceRequest]:
    rng = random.Random(7)
    out, now = [], rng.expovariate(rate)
    while now < seconds:
        out.append(make(rng, now))
        now += rng.expovariate(rate)
    return out


def length(rng: random.Random, middle: float, spread: float, most: int) -> int:
    return min(most, 1 + int(middle * rng.lognormvariate(0.0, spread)))


def few(seconds: float) -> list[TraceRequest]:
    """Requests that arrive while a burst is served."""
    return arrivals(1.0, seconds, lambda rng, t: ask(1 + t, 50, 20))


LOADS: dict[str, tuple[dict[str, object], list[TraceRequest]]] = {
    "each output as long": ({}, arrivals(6, 45, lambda rng, t: ask(t, 100, 250))),
    "outputs that end by themselves": (
        {},
        arrivals(8, 45, lambda rng, t: ask(t, 100, length(rng, 120, 0.9, 1500), max_tokens=4000)),
    ),
    "short and long": ({}, arrivals(8, 40, lambda rng, t: ask(t, 50, 600 if rng.random() < 0.3 else 20))),
    "many choices": ({}, [*(ask(0.05 * i, 50, 60, n=32) for i in range(30)), *few(50)]),
    "a burst of long outputs": ({}, [*(ask(0.01 * i, 50, 1200) for i in range(100)), *few(60)]),
    "a burst that ends by itself": (
        {},
        arrivals(1, 80, lambda rng, t: ask(t, 50, length(rng, 400, 0.8, 3000), max_tokens=4000))
        + [ask(30 + 0.02 * i, 50, length(random.Random(i), 400, 0.8, 3000), max_tokens=4000) for i in range(150)],
    ),
    "long prompts": ({}, arrivals(3, 60, lambda rng, t: ask(t, 3000, 5))),
    "a prefix that is found": (
        {},
        arrivals(8, 40, lambda rng, t: ask(t, 2000, 200, prefix_group=f"{rng.randrange(4)}", prefix_tokens=1900)),
    ),
    "few blocks": ({"num_blocks": 500}, arrivals(4, 50, lambda rng, t: ask(t, 400, 150))),
    "two workers": ({"num_workers": 2}, arrivals(14, 25, lambda rng, t: ask(t, 100, 200))),
}


def estimates(more: dict[str, object], requests: list[TraceRequest]) -> list[tuple[float, float]]:
    """For each request: the estimate when it arrived, and its real wait for the first token."""
    process = ProcessConfig(name="simulator", bus=BusConfig(registry="ipc://none", bind="ipc://none"))
    settings: dict[str, object] = {"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_queue_len": 10**6}
    made = SchedulerConfig(process=process, served_model_names=["m"], max_queue_tokens=10**9, **settings)
    asked = sorted(requests, key=lambda request: request.arrival_s)
    setup = SimulationConfig(process=process, scheduler=made, trace="t.jsonl", cost=COST, **more)
    simulation = Simulation(setup, asked)
    core, told = simulation.core, dict[int, float]()
    handle = core.on_message

    def note(peer: int, frame: SchedulerIn, now: float) -> None:
        if isinstance(frame, Generate) and now > WARM_S and (stats := core.stats()).waiting:
            told[int(frame.request_id)] = stats.wait_s
        handle(peer, frame, now)

    core.on_message = note
    simulation.run()
    return [(seconds, simulation.record.flows[i].ttft_s) for i, seconds in told.items()]


def is_near(told: float, waited: float, factor: float, seconds: float) -> bool:
    return waited / factor <= told <= waited * factor or abs(told - waited) <= seconds


@pytest.mark.parametrize("load", LOADS)
def test_the_estimate_is_close_to_the_real_wait(load: str) -> None:
    found = estimates(*LOADS[load])
    factors = sorted(max(told, 0.01) / waited for told, waited in found if waited >= LONG_S)
    print(f"{load}: {len(factors)} waits, longest {max(w for _, w in found):.1f} s, factors", end=" ")
    print(*(f"{factors[int(share * (len(factors) - 1))]:.2f}" for share in (0, 0.05, 0.5, 0.95, 1)))
    assert len(factors) >= 20, "the load keeps requests waiting"
    assert sum(is_near(*pair, WORST, FEW_S) for pair in found) >= 0.99 * len(found)
    assert sum(is_near(*pair, USUAL, USUAL) for pair in found) >= 0.9 * len(found)


def test_lengths_are_learned_from_ended_and_running_sequences() -> None:
    rng = random.Random(3)
    lengths = OutputLengths()
    assert 100 < lengths.survival([], 0.0).mean(10**5) < 1000, "before anything has ended"
    for _ in range(400):
        num_tokens = int(rng.expovariate(1 / 300))
        lengths.ended(min(num_tokens, 500), num_tokens < 500)
    learned = lengths.survival([], 0.0)
    assert learned.mean(10**6) == pytest.approx(300, rel=0.25), "those cut off at 500 say only that they are longer"
    assert learned.mean(500) == pytest.approx(300 * (1 - 2.718 ** (-500 / 300)), rel=0.1)
    assert learned.at(300) == pytest.approx(2.718**-1, rel=0.2)
    longer = lengths.survival([1000] * 24, 40.0)
    assert longer.at(400) > learned.at(400) + 0.3, "a thousand others have passed that without an end"
