"""Step times are learned, whatever the steps are like, and followed when they change."""

import random

import pytest

from blockyard.services.scheduler.batch.step_times import MOST_TOKENS, Load, StepTimes


def cost(load: Load, scale: float = 1.0) -> float:
    return scale * (0.0046 + 35e-6 * load.decodes + 22e-6 * load.tokens)


def learn(times: StepTimes, loads: list[Load], scale: float = 1.0) -> None:
    for load in loads:
        times.took(load, cost(load, scale))


def mixed(seed: int, num: int) -> list[Load]:
    rng = random.Random(seed)
    return [Load(rng.randrange(200, 256), rng.choice([0, 0, 200, 600, 2048])) for _ in range(num)]


@pytest.mark.parametrize("prior_s", [0.0, 0.0046])
def test_a_cost_model_is_found_in_mixed_steps(prior_s: float) -> None:
    times = StepTimes(prior_s)
    learn(times, mixed(1, 200))
    for load in (Load(220, 0), Load(240, 512), Load(256, 2048)):
        assert times.expect(load) == pytest.approx(cost(load), rel=0.03)
        assert 0.8 * cost(load) < times.least(load) <= cost(load) * 1.03
    assert times.tokens_in(0.011) == pytest.approx(500, rel=0.05)


def test_a_change_is_followed() -> None:
    times = StepTimes(0.0046)
    learn(times, mixed(1, 200))
    learn(times, mixed(2, 200), scale=2.0)
    assert times.expect(Load(240, 512)) == pytest.approx(2 * cost(Load(240, 512)), rel=0.03)


def test_what_steps_do_not_tell_apart_stays_where_it_was() -> None:
    times = StepTimes(0.0046)
    learn(times, [Load(256, 0)] * 1000)
    assert times.expect(Load(256, 0)) == pytest.approx(cost(Load(256, 0)), rel=0.001)
    assert times.expect(Load(0, 0)) == pytest.approx(0.0046, rel=0.2)
    assert times.tokens_in(1.0) == MOST_TOKENS, "no prompt was seen"


def test_steps_that_vary_are_expected_to_end_early() -> None:
    times, rng = StepTimes(0.0), random.Random(3)
    for _ in range(300):
        times.took(Load(8, 0), rng.uniform(0.005, 0.015))
    assert times.expect(Load(8, 0)) == pytest.approx(0.01, rel=0.15)
    assert times.least(Load(8, 0)) <= 0.006


def test_a_worker_that_does_not_say_teaches_nothing() -> None:
    times = StepTimes(0.0)
    times.took(Load(1, 0), 0.0)
    assert not times.known
    assert times.expect(Load(1, 0)) == 0
