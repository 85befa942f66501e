"""The steps of a GPU on two replicas that have the experts together, with its operations in plain torch.

Prefills and decodes ahead of the host, of one replica or of both: the tokens are those of one that has all experts.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from equality import noisy
from plan_driver import Driver, Stream
from ties import Ties
from tiny_models import BY_NAME, VOCAB, greedy_score, start
from two_replicas import CAPACITY, TwoReplicas

from blockyard.services.gpu_worker.execution.cuda.decode_graphs import DecodeSteps
from blockyard.services.gpu_worker.parallel import expert_balance
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.config.services.worker import ExpertBalance
from blockyard.shared.messages import Sampling


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def streams(found: list[Stream], lengths: tuple[int, ...], num_tokens: int, depth: int, runner: Runner) -> None:
    driver, rng = Driver(runner, num_slots=CAPACITY, depth=depth), np.random.default_rng(3)
    for i, length in enumerate(lengths):
        sampling = Sampling(num_tokens, 0.8 * (i % 2), seed=i, ignore_eos=True)
        found.append(driver.add(rng.integers(2, VOCAB, length).tolist(), sampling, preempt_at=(5,) if i == 2 else ()))
    driver.run()


@pytest.mark.parametrize(
    ("graph_rows", "balance"), [((), None), ((2, 8), ExpertBalance(interval_steps=5, window_steps=4))]
)
def test_tokens_are_those_of_one_replica(
    graph_rows: tuple[int, ...], balance: ExpertBalance | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first replica has several prompts, the second one, and one of them is done long before the other."""
    monkeypatch.setattr(expert_balance, "CHANCE", 0.0)
    folder, group = tmp_path / "model", tmp_path / "group"
    group.mkdir()
    score = greedy_score(BY_NAME["qwen3-moe"].save(folder))
    alone = start(folder, max_num_seqs=CAPACITY)
    of_first, of_second = ((3, 17, 40, 64), 9), ((5,), 30)
    expected: list[Stream] = []
    for lengths, num_tokens in (of_first, of_second):
        streams(expected, lengths, num_tokens, 1, alone)
    first_streams, second_streams = list[Stream](), list[Stream]()
    both = TwoReplicas(folder, group, alone.geometry, graph_rows, balance).run(
        partial(streams, first_streams, *of_first, 3), partial(streams, second_streams, *of_second, 2)
    )
    ties = Ties()
    for i, (one, own) in enumerate(zip(expected, [*first_streams, *second_streams], strict=True)):
        ties.compare(f"stream {i}", one.prompt, one.output, own.output, noisy(score, one.sampling, 0))
    ties.check()
    agreed = both.offers[0].agreed
    assert agreed == both.offers[1].agreed, "both have computed the same steps"
    assert any(first.num_rows > 1 and second.num_rows == 1 for first, second in agreed), "one is padded to the other"
    assert any(not first.is_decode and second.is_decode for first, second in agreed)
    assert any(not first.num_rows for first, _ in agreed) and agreed[-1][1].num_rows, "the first serves the second"
    assert all(first.num_rows or second.num_rows for first, second in agreed), "no step has no rows"
    assert both.num_moved[0] == both.num_moved[1] and bool(both.num_moved[0]) == (balance is not None)
    rows = [[size.rows for size in sizes] for sizes in both.replayed]
    assert rows[0] == rows[1] and set(rows[0]) == set(graph_rows), "both replay graphs of one size"
    decodes = [pair for pair in agreed if all(one.is_decode for one in pair)]
    assert len(rows[0]) == (len(decodes) if graph_rows else 0), "and none beside a prompt"


def test_a_prompt_of_fewer_tokens_than_sampled_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that are sampled are padded, so that the last layer of experts has more of them than the others."""
    folder, group = tmp_path / "model", tmp_path / "group"
    group.mkdir()
    BY_NAME["qwen3-moe"].save(folder)
    monkeypatch.setattr(DecodeSteps, "padded_num_seqs", lambda steps, rows: CAPACITY)
    alone, found = start(folder, max_num_seqs=CAPACITY), [list[Stream]() for _ in range(4)]
    for streams_of_one, length in zip(found[:2], (3, 5), strict=True):
        streams(streams_of_one, (length,), 4, 1, alone)
    TwoReplicas(folder, group, alone.geometry).run(
        *(partial(streams, some, (length,), 4, 1) for some, length in zip(found[2:], (3, 5), strict=True))
    )
    assert [one.output for some in found[:2] for one in some] == [one.output for some in found[2:] for one in some]
