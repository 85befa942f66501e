"""Step times are learned, whatever the steps are like, and followed when they change."""

import random

import pytest

from blockyard.services.scheduler.plan_pacer import MOST_TOKENS, StepLoad, StepTimes


def cost(load: StepLoad, scale: float = 1.0) -> float:
    return scale * (0.0046 + 35e-6 * load.decodes + 22e-6 * load.tokens)


def learn(times: StepTimes, loads: list[StepLoad], scale: float = 1.0) -> None:
    for load in loads:
        times.record(load, cost(load, scale))


def mixed(seed: int, num: int) -> list[StepLoad]:
    rng = random.Random(seed)
    return [StepLoad(rng.randrange(200, 256), rng.choice([0, 0, 200, 600, 2048])) for _ in range(num)]


@pytest.mark.parametrize("prior_s", [0.0, 0.0046])
def test_a_cost_model_is_found_in_mixed_steps(prior_s: float) -> None:
    times = StepTimes(prior_s)
    learn(times, mixed(1, 200))
    for load in (StepLoad(220, 0), StepLoad(240, 512), StepLoad(256, 2048)):
        assert times.expected_s(load) == pytest.approx(cost(load), rel=0.03)
        assert 0.8 * cost(load) < times.lower_bound(load) <= cost(load) * 1.03
    assert times.tokens_within(0.011) == pytest.approx(500, rel=0.05)


def test_a_change_is_followed() -> None:
    times = StepTimes(0.0046)
    learn(times, mixed(1, 200))
    learn(times, mixed(2, 200), scale=2.0)
    assert times.expected_s(StepLoad(240, 512)) == pytest.approx(2 * cost(StepLoad(240, 512)), rel=0.03)


def test_what_steps_do_not_tell_apart_stays_where_it_was() -> None:
    times = StepTimes(0.0046)
    learn(times, [StepLoad(256, 0)] * 1000)
    assert times.expected_s(StepLoad(256, 0)) == pytest.approx(cost(StepLoad(256, 0)), rel=0.001)
    assert times.expected_s(StepLoad(0, 0)) == pytest.approx(0.0046, rel=0.2)
    assert times.tokens_within(1.0) == MOST_TOKENS, "no prompt was seen"


def test_steps_that_vary_are_expected_to_end_early() -> None:
    times, rng = StepTimes(0.0), random.Random(3)
    for _ in range(300):
        times.record(StepLoad(8, 0), rng.uniform(0.005, 0.015))
    assert times.expected_s(StepLoad(8, 0)) == pytest.approx(0.01, rel=0.15)
    assert times.lower_bound(StepLoad(8, 0)) <= 0.006


def test_a_worker_that_does_not_say_teaches_nothing() -> None:
    times = StepTimes(0.0)
    times.record(StepLoad(1, 0), 0.0)
    assert not times.is_known
    assert times.expected_s(StepLoad(1, 0)) == 0
