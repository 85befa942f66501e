"""Steps with small prefills in padded sizes: the same tokens as in their own, whatever pads."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from plan_driver import Driver
from reference_ops import run_ahead
from tiny_models import BY_NAME, VOCAB, start

from blockyard.services.gpu_worker.device_loop import DeviceLoop
from blockyard.services.gpu_worker.mixed_graphs import MixedGraph, MixedGraphs, sizes
from blockyard.services.gpu_worker.mixed_steps import Due, Layout, MixedStep, clear
from blockyard.services.gpu_worker.runner import Runner
from blockyard.shared.messages import Sampling

CAPACITY = 6


class Step:
    """Stands for the two CUDA graphs of a step on CPU: computes it anew from the words it has by then."""

    def __init__(self, step: MixedStep) -> None:
        self.count = self.count_asked = 0
        self._step = step

    def forward(self) -> None:
        self.count += 1
        self._due = self._step.forward()

    def sample(self, due: Due | None, asked: bool) -> None:
        self.count_asked += asked
        self._step.sample(self._due, asked)


@dataclass
class Replay:
    replay: Callable[[], None]


def padded(loop: DeviceLoop, wanted: list[tuple[int, int]]) -> list[Step]:
    """Gives a loop graphs of so many rows of decodes and tokens of prompts."""
    steps = []
    for decodes, fresh in wanted:
        layout = Layout(decodes, fresh, 4, min(decodes + 3, CAPACITY))
        words = torch.empty(sum(layout.parts), dtype=torch.int64)
        clear(words, layout)
        step = Step(MixedStep(loop.steps, layout, words))
        forward, sample = Replay(step.forward), Replay(partial(step.sample, None, False))
        graph = MixedGraph(layout, words, cast(Any, step), cast(Any, None), cast(Any, forward), cast(Any, sample))
        loop._graphs._graphs.append(graph)
        steps.append(step)
    loop._graphs._graphs.sort(key=lambda one: one.layout.tokens)
    return steps


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    folder: Path = tmp_path_factory.mktemp("tiny")
    BY_NAME["llama"].save(folder)
    return start(folder, max_model_len=64)


def outputs(runner: Runner, chunk: int, asking: int | None) -> list[list[int]]:
    driver = Driver(runner, num_slots=CAPACITY, depth=2, chunk=chunk)
    rng = np.random.default_rng(0)
    streams = []
    for i, n in enumerate((9, 1, 17, 3, 30, 2, 12)):
        penalty = 0.5 if i == asking else 0.0
        sampling = Sampling(6 + i, 0.9 * (i % 2), seed=i, ignore_eos=True, presence_penalty=penalty)
        streams.append(driver.add(rng.integers(2, VOCAB, n).tolist(), sampling))
    driver.run()
    return [stream.output for stream in streams]


@pytest.mark.parametrize(("chunk", "num_used", "asking"), [(5, 5, None), (1000, 1, None), (5, 5, 4)])
def test_what_pads_changes_nothing(runner: Runner, chunk: int, num_used: int, asking: int | None) -> None:
    """asking: a stream whose logits are changed."""
    run_ahead(runner, CAPACITY)
    expected = outputs(runner, chunk, asking)
    loop = run_ahead(runner, CAPACITY)
    steps = padded(loop, [(0, 20), (0, 90), (2, 20), (6, 8), (6, 32)])
    assert outputs(runner, chunk, asking) == expected
    assert sum(step.count for step in steps) >= num_used
    assert (sum(step.count_asked for step in steps) > 0) == (asking is not None)


def test_the_smallest_that_fits_is_found(runner: Runner) -> None:
    loop = run_ahead(runner, CAPACITY)
    padded(loop, [(0, 20), (0, 40), (2, 20), (6, 8), (6, 32)])
    graphs = MixedGraphs(loop.steps, 64)
    graphs._graphs = loop._graphs._graphs

    def found(*counts: int) -> tuple[int, int] | None:
        one = graphs.find(np.array(counts))
        return None if one is None else (one.layout.decodes, one.layout.fresh)

    assert found(20) == (0, 20)
    assert found(10, 11) == (0, 40)
    assert found(41) is None
    assert found(1, 5) == (6, 8)
    assert found(1, 1, 9) == (2, 20)
    assert found(1, 1, 1, 9) == (6, 32)
    assert found(2, 2, 2, 2) is None, "more prompts than it has room for"
    assert found(1, 1, 1, 1, 2, 2, 2) is None, "more sequences than rows of results"


def test_sizes() -> None:
    assert sizes(1, 100) == [(0, 64), (0, 32), (0, 96)]
    some = sizes(20, 2048)
    assert some[:6] == [*((0, n) for n in (512, 128, 256, 64, 32)), (16, 512)]
    assert (0, 2048) in some
    assert {rows for rows, _ in sizes(200, 2048)} == {0, 16, 64, 128}
