"""Choices of a lost worker group join siblings in another group, and give the same tokens as without the loss."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from core_loop import DETOKENIZER, MORE, WORKER, CoreLoop
from tiny_models import BY_NAME, VOCAB, start

from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Beam, Sampling, Stop, StreamRef

MAX_TOKENS = 24
DEATH_AFTER = 17  # plans
Outputs = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> list[Runner]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    BY_NAME["llama"].save(folder)
    return [start(folder, max_model_len=128, num_gpu_blocks_override=90, batch_invariant=True) for _ in range(2)]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, VOCAB, length).tolist()


def sampling(seed: int) -> Sampling:
    return Sampling(MAX_TOKENS, temperature=0.8, seed=seed, ignore_eos=True)


def alone(runner: Runner, name: str, ids: list[int], n: int, asked: Sampling, **more: object) -> Outputs:
    """Call it only while no other loop uses the runner."""
    loop = CoreLoop(runner, depth=0)
    loop.add(name, ids, asked, n, **more)
    loop.run()
    return loop.outputs


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_two_choices_join_the_same_sibling_in_one_plan(runners: list[Runner], prefix_caching: bool) -> None:
    """The second choice must not copy the old content of the first choice's last block."""
    ids = prompt(0, 22)
    expected = alone(runners[0], "a", ids, 6, sampling(7))
    loop = CoreLoop(runners[0], 0, max_num_seqs=3, more=[runners[1]], prefix_caching=prefix_caching)
    loop.add("a", ids, sampling(7), 6)
    loop.turn()
    while min(loop.num_plans.values()) < 8:
        loop.step()
    first, second, third = (entry.sequence.index for entry in loop.core.groups[MORE].running)
    loop.lose(WORKER, again=False)
    loop.core.on_message(DETOKENIZER, Stop([StreamRef("a", 0, second), StreamRef("a", 0, third)]), 0.0)
    loop.run()
    for (name, choice), output in loop.outputs.items():
        known = len(output) if choice in (second, third) else MAX_TOKENS
        assert output == expected[name, choice][:known], f"choice {choice}, {first} ran on"


ASKED = [(f"r{i}", prompt(i, 11 + 5 * i % 23), 3 + i % 4) for i in range(6)]
SEARCH = ("s", prompt(50, 13), 2)
GREEDY = Sampling(MAX_TOKENS // 2, temperature=0.0, ignore_eos=True, num_logprobs=0)


@pytest.fixture(scope="module")
def undisturbed(runners: list[Runner]) -> Outputs:
    outputs = alone(runners[0], *SEARCH, GREEDY, beam=Beam(3))
    for i, (name, ids, n) in enumerate(ASKED):
        outputs |= alone(runners[0], name, ids, n, sampling(i))
    return outputs


@pytest.mark.parametrize("depth", [0, 2])
def test_groups_die_in_turn(runners: list[Runner], undisturbed: Outputs, depth: int) -> None:
    """Choices and beams, with too few slots for all of them."""
    loop = CoreLoop(runners[0], depth, max_num_seqs=7, more=[runners[1]])
    for i, (name, ids, n) in enumerate(ASKED):
        loop.add(name, ids, sampling(i), n)
    loop.add(*SEARCH[:2], GREEDY, SEARCH[2], beam=Beam(3))
    lost = Counter[int]()
    loop.turn()
    while loop.plans:
        loop.step()
        if sum(loop.num_plans.values()) > DEATH_AFTER * (lost.total() + 1):
            worker = (WORKER, MORE)[lost.total() % 2]
            loop.lose(worker)
            lost[worker] += 1
    assert min(lost.values()) > 1
    assert loop.outputs == undisturbed
