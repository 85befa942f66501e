"""Graphs of packed steps: padded steps have the numbers of eager ones. A fake graph computes again from its inputs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_capture import FakeCapture
from packed_model import load_model
from packed_plans import packed, rows_of
from tiny_checkpoint import VOCAB
from tiny_models import settings
from tiny_poolers import BY_NAME
from torch import Tensor

from blockyard.kernels.attention.packed.packed_attention import packed_attention_reference
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker import engine
from blockyard.services.gpu_worker.encoders.encoder_runner import EncoderRunner
from blockyard.services.gpu_worker.execution.packed_graphs import text_graphs
from blockyard.shared.messages import PackedPart, StepPlan

RNG = np.random.default_rng(4)


class ReferenceProduct:
    """Reads where sequences begin when it is called, as the kernel does."""

    def __init__(self, starts: Tensor, longest: int) -> None:
        self._starts = starts

    def __call__(self, qkv: Tensor, rules: ScoreRules, num_heads: int) -> Tensor:
        return packed_attention_reference(qkv, self._starts, rules, num_heads)


@pytest.fixture
def runner(tmp_path: Path) -> EncoderRunner:
    BY_NAME["bert"].save(tmp_path)
    made = engine.start(settings(tmp_path, device="cpu", dtype="float32"), lambda *_: None)
    assert isinstance(made, EncoderRunner)
    return made


def with_graphs(runner: EncoderRunner, most_tokens: int = 256) -> FakeCapture:
    capture = FakeCapture()
    graphs = text_graphs(runner.model, capture, ReferenceProduct, most_tokens=most_tokens, has_types=True)
    assert graphs.capture().startswith("CUDA graphs of packed steps: 8 of up to 256 tokens in ")
    runner.steps.graphs = graphs
    return capture


def run(runner: EncoderRunner, texts: list[list[int]], parts: list[PackedPart] | None = None) -> list[Tensor]:
    return rows_of(runner.execute(StepPlan(0, 1, [], [], [], [], packed=packed(texts, parts))))


def texts_of(*lengths: int) -> list[list[int]]:
    return [RNG.integers(2, VOCAB, n).tolist() for n in lengths]


def test_replayed_steps_are_as_eager_ones(runner: EncoderRunner) -> None:
    steps = [texts_of(5), texts_of(16), texts_of(3, 30, 1), texts_of(100, 90, 2), texts_of(120, 120), texts_of(1, 1)]
    expected = [run(runner, texts) for texts in steps]
    capture = with_graphs(runner)
    for texts, rows in zip([*steps, *reversed(steps)], [*expected, *reversed(expected)], strict=True):
        for one, other in zip(run(runner, texts), rows, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert capture.num_replays == 2 * len(steps)


def test_short_texts_have_graphs_of_their_own(runner: EncoderRunner) -> None:
    """The first graphs are those of 256 tokens: of texts of up to 32, and of any."""
    capture = with_graphs(runner)
    for lengths, replays in (([32] * 5, [1, 0]), ([33, *[32] * 4], [1, 1])):
        run(runner, texts_of(*lengths))
        assert [graph.num_replays for graph in capture.graphs[:2]] == replays and capture.num_replays == sum(replays)


def test_token_types_of_a_step_do_not_stay(runner: EncoderRunner) -> None:
    texts = texts_of(9, 12)
    seconds = np.array([4, 6], "<u4").tobytes()
    pairs, alone = [PackedPart(2, second_starts=seconds)], [PackedPart(2)]
    expected = [run(runner, texts, pairs), run(runner, texts, alone)]
    assert not torch.allclose(expected[0][0], expected[1][0])
    with_graphs(runner)
    for parts, rows in zip([pairs, alone, pairs], [*expected, expected[0]], strict=True):
        for one, other in zip(run(runner, texts, parts), rows, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_eager(runner: EncoderRunner) -> None:
    capture = with_graphs(runner)
    run(runner, texts_of(100, 100, 60))  # 260 tokens
    run(runner, texts_of(*[1] * 33))  # more texts than the graph of 256 tokens has room for
    assert not capture.num_replays
    run(runner, texts_of(*[1] * 32))
    assert capture.num_replays == 1


def test_results_do_not_change_with_the_next_step(runner: EncoderRunner) -> None:
    """All hidden states of a step are results, and the next step runs before they are read."""
    with_graphs(runner)
    steps = runner.steps
    graphs = steps.graphs
    assert graphs is not None
    ids, lengths = np.array(texts_of(8)[0]), np.array([8])
    with torch.inference_mode():
        first = graphs.forward(ids, np.arange(8), lengths)
        assert first is not None
        before = first.clone()
        graphs.forward(ids[::-1].copy(), np.arange(8), lengths)
    assert torch.equal(first, before)


def test_sleep_captures_again(runner: EncoderRunner) -> None:
    capture = with_graphs(runner)
    runner.release_memory()
    runner.reclaim_memory()
    assert len(capture.graphs) == 16
    run(runner, texts_of(5))
    assert sum(graph.num_replays for graph in capture.graphs[:8]) == 0 and capture.num_replays == 1


def test_without_memory_all_steps_are_eager(tmp_path: Path) -> None:
    BY_NAME["bert"].save(tmp_path)
    capture = FakeCapture()
    capture.problem = "out of memory"
    graphs = text_graphs(load_model(tmp_path), capture, ReferenceProduct, most_tokens=64, has_types=False)
    assert graphs.capture() == "CUDA graphs of packed steps: none: out of memory"
    assert graphs.forward(np.array([2]), np.array([0]), np.array([1])) is None
