"""Ranks that are delayed at random make the same collectives in the same order, and none of them hangs.

`make test-long` has 10,000 plans of each layout.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from delayed_ranks import DelayedRanks
from hypothesis import settings
from plan_driver import Driver
from tiny_models import BY_NAME, VOCAB, start

from blockyard.services.gpu_worker.parallel import expert_balance
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.worker import ExpertBalance
from blockyard.shared.messages import FinishReason, Sampling, Stats

NUM_PLANS = 10_000 if settings.get_current_profile_name() == "long" else 120
CAPACITY = 6


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run_streams(runner: Runner, rng: random.Random) -> int:
    """Runs random streams, in chunks, ahead of results and with preemption. Returns the number of plans."""
    driver = Driver(runner, CAPACITY, rng.randrange(4), rng.choice([3, 16, 10**6]), rng.randrange(100))
    for i in range(rng.randrange(1, CAPACITY + 3)):
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 50))]
        sampling = Sampling(
            rng.randrange(1, 12), 0.8 * (i % 2), seed=i, ignore_eos=True, num_logprobs=rng.choice([0, 2])
        )
        driver.add(prompt, sampling, preempt_at=tuple(rng.sample(range(1, 12), rng.randrange(2))))
    driver.run()
    for stream in driver.streams:
        assert stream.finish is FinishReason.LENGTH and len(stream.output) == stream.sampling.max_tokens
    return driver.completed


@pytest.mark.parametrize("as_gpus", [False, True])
@pytest.mark.parametrize(("size", "num_stages"), [(2, 1), (1, 2), (2, 2)])
def test_collectives_are_the_same(size: int, num_stages: int, as_gpus: bool, tmp_path: Path, threads: None) -> None:
    folder, group, rng = tmp_path / "model", tmp_path / "group", random.Random(5)
    group.mkdir()
    BY_NAME["llama"].save(folder)
    geometry = start(folder, max_num_seqs=CAPACITY).geometry
    ranks, num_plans = DelayedRanks(folder, group, geometry, size, num_stages, as_gpus=as_gpus), 0
    while num_plans < NUM_PLANS:
        num_plans += run_streams(ranks.runner, rng)
    ranks.close()
    assert ranks.check_records() > num_plans


@pytest.mark.parametrize(("size", "num_stages", "as_gpus"), [(3, 1, True), (2, 2, False)])
def test_experts_move_on_all_ranks_alike(
    size: int, num_stages: int, as_gpus: bool, tmp_path: Path, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, group, rng = tmp_path / "model", tmp_path / "group", random.Random(7)
    group.mkdir()
    BY_NAME["mixtral"].save(folder)
    monkeypatch.setattr(expert_balance, "CHANCE", 0.0)
    geometry, balance = start(folder, max_num_seqs=CAPACITY).geometry, ExpertBalance(interval_steps=7, window_steps=5)
    ranks = DelayedRanks(folder, group, geometry, size, num_stages, as_gpus=as_gpus, balance=balance)
    num_plans = 0
    while num_plans < NUM_PLANS // 2:
        num_plans += run_streams(ranks.runner, rng)
    moved = ranks.runner.count(Stats()).experts_moved_total
    ranks.close()
    assert ranks.check_records() > num_plans and moved > 4
