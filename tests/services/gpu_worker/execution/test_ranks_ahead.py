"""The steps of a GPU on two ranks, with its operations in plain torch: the follower is a thread.

Prefills and decodes ahead of the host, chunks, preemption, log-probabilities: the tokens are those of one rank.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from equality import noisy
from plan_driver import Driver, Stream
from ties import Ties
from tiny_models import BY_NAME, VOCAB, greedy_score, start
from two_ranks import CAPACITY, TwoRanks

from blockyard.shared.messages import Sampling

NAMES = ("llama", "gemma4-moe", "deepseek-v3")
LAYOUTS = [*((name, 2, 1) for name in NAMES), ("gemma4-moe", 1, 2)]  # ranks of a stage, and stages


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def streams(driver: Driver) -> list[Stream]:
    rng = np.random.default_rng(3)
    made = []
    for i, length in enumerate((1, 3, 17, 40, 64)):
        sampling = Sampling(12, 0.8 * (i % 2), seed=i, ignore_eos=True, num_logprobs=2, presence_penalty=0.3 * (i == 1))
        made.append(driver.add(rng.integers(2, VOCAB, length).tolist(), sampling, preempt_at=(5,) if i == 3 else ()))
    driver.run()
    return made


@pytest.mark.parametrize(("name", "size", "num_stages"), LAYOUTS)
def test_tokens_are_those_of_one_rank(name: str, size: int, num_stages: int, tmp_path: Path, threads: None) -> None:
    folder, group = tmp_path / "model", tmp_path / "group"
    group.mkdir()
    score = greedy_score(BY_NAME[name].save(folder))
    alone = start(folder, max_num_seqs=CAPACITY)
    expected = streams(Driver(alone, num_slots=CAPACITY))
    ranks, ties = TwoRanks(folder, group, alone.geometry, size, num_stages), Ties()
    try:
        for options in ({"depth": 3}, {"depth": 2, "chunk": 9}):
            for i, (one, own) in enumerate(
                zip(expected, streams(Driver(ranks.runner, num_slots=CAPACITY, **options)), strict=True)
            ):
                if i != 1:  # the judge knows no penalties
                    judge = noisy(score, one.sampling, 0)
                    ties.compare(f"{options} {i}", one.prompt, one.output, own.output, judge)
                else:
                    assert own.output == one.output
    finally:
        ranks.close()
    assert any(one.num_starts for one in ranks.forwards)
    assert any(one.num_starts == 0 and one.num_logits < 0 for one in ranks.forwards)
