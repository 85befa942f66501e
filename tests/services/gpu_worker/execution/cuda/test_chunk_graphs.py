"""CUDA graphs of decoders that pool: padded steps have the numbers of eager ones.

Without a GPU a fake graph computes again from its inputs, with attention in plain torch.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_capture import FakeCapture
from hypothesis import given
from hypothesis import strategies as st
from pooled_texts import start_pooled, steps_of, vectors
from reference_ops import ReferenceOps
from tiny_checkpoint import LLAMA, VOCAB, Tiny
from tiny_poolers import BY_NAME
from torch import Tensor
from transformers import Qwen3Config, Qwen3Model

from blockyard.services.gpu_worker.execution import packed_graphs
from blockyard.services.gpu_worker.execution.cuda import chunk_graphs as module
from blockyard.services.gpu_worker.execution.cuda.chunk_graphs import (
    PADDING_ROWS,
    SIZES,
    ChunkGraphAttention,
    chunk_graphs,
    nums_of_sequences,
    sizes_of,
)
from blockyard.services.gpu_worker.execution.packed_graphs import PackedGraphs
from blockyard.services.gpu_worker.runner import Runner

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
MEAN = '{"pooling_type": "MEAN", "normalize": true}'
ALL = '{"pooling_type": "ALL", "normalize": false}'
LAST = '{"pooling_type": "LAST", "normalize": true}'
SMALL = {"max_num_batched_tokens": 64, "device": "cpu", "dtype": "float32"}


def texts_of(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(sum(lengths))
    return [rng.integers(2, VOCAB, n).tolist() for n in lengths]


def assert_alike(got: list[Tensor], expected: list[Tensor], tolerance: float = 1e-4) -> None:
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)


def count_replays(graphs: PackedGraphs, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns a list to which each step adds whether it was a graph."""
    were_graphs, forward = list[bool](), graphs.forward

    def counted(*args: Any, **kwargs: Any) -> Tensor | None:
        hidden = forward(*args, **kwargs)
        were_graphs.append(hidden is not None)
        return hidden

    monkeypatch.setattr(graphs, "forward", counted)
    return were_graphs


@pytest.mark.parametrize("most_tokens", [4, 16, 100, 2048, 5000, 8192, 16384, 40000])
def test_padding_of_large_steps_is_small(most_tokens: int) -> None:
    sizes = sizes_of(most_tokens)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(most_tokens, SIZES[-1])
    for small, large in itertools.pairwise(sizes):
        assert large - small <= (large * 0.12 if small >= 2048 else large * 0.51)


# --- a fake graph


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("qwen3")
    BY_NAME["qwen3-model"].save(made)
    return made


@pytest.fixture
def _in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "build_attention", ReferenceOps().attend)


def with_graphs(runner: Runner, capture: FakeCapture) -> PackedGraphs:
    graphs = chunk_graphs(runner.model, runner.pool, capture, runner.geometry)
    steps_of(runner).graphs = graphs
    return graphs


@pytest.mark.cpu
@pytest.mark.usefixtures("_in_torch")
@pytest.mark.parametrize("pooling", [LAST, MEAN, ALL])
def test_replayed_steps_are_as_eager_ones(pooling: str, folder: Path) -> None:
    """Whole, in chunks of all sizes, and chunks of one token."""
    runner = start_pooled(folder, 4, 40, pooler_config=pooling, **SMALL)
    texts, budgets = texts_of(1, 40, 9, 23), (64, 11)
    expected = vectors(runner, texts, 64)
    capture = FakeCapture()
    assert with_graphs(runner, capture).capture().startswith("CUDA graphs of packed steps: 3 of up to 64 tokens in ")
    for budget in budgets:
        assert_alike(vectors(runner, texts, budget), expected)
    assert capture.num_replays == sum(-(-73 // budget) for budget in budgets)
    if pooling == LAST:
        assert_alike(vectors(runner, texts, 64, cached=[0, 32, 0, 16]), expected)


@pytest.mark.cpu
@pytest.mark.usefixtures("_in_torch")
def test_trials_touch_no_kv(folder: Path) -> None:
    runner = start_pooled(folder, 2, 40, **SMALL)
    texts = texts_of(40, 33)
    vectors(runner, texts, 64)
    before = [run.clone() for run in runner.pool.runs]
    with_graphs(runner, FakeCapture()).capture()
    assert all(torch.equal(*both) for both in zip(runner.pool.runs, before, strict=True))


@pytest.mark.cpu
@pytest.mark.usefixtures("_in_torch")
def test_which_steps_are_eager(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with more tokens than a size, those that measure scales, and those with much padding of a size that runs
    longer than its launch."""
    runner, capture = start_pooled(folder, 20, 40, **(SMALL | {"max_num_batched_tokens": 32})), FakeCapture()
    graphs = with_graphs(runner, capture)
    capture.times_s = 0.5, 1.0
    graphs.capture()
    were_graphs = count_replays(graphs, monkeypatch)
    for lengths in ([32], [28], [27], [33], [1] * 16, [1] * 15):
        vectors(runner, texts_of(*lengths), 40)
    assert were_graphs == [True, True, False, False, False, True]
    runner.pool.scales_pending = True
    num_replays = capture.num_replays
    vectors(runner, texts_of(32), 40)
    runner.pool.scales_pending = False
    assert capture.num_replays == num_replays


@pytest.mark.cpu
@pytest.mark.usefixtures("_in_torch")
def test_sizes_that_take_too_much_memory_are_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, capture = start_pooled(folder, 4, 40, **SMALL), FakeCapture()
    expected = vectors(runner, texts_of(40, 20), 64)
    capture.num_refused = 1
    graphs = with_graphs(runner, capture)
    assert graphs.capture().startswith("CUDA graphs of packed steps: 2 of up to 32 tokens in ")
    were_graphs = count_replays(graphs, monkeypatch)
    assert_alike(vectors(runner, texts_of(40, 20), 64), expected)
    assert_alike(vectors(runner, texts_of(40, 20), 32), expected)
    assert were_graphs == [False, True, True]


@pytest.mark.cpu
@pytest.mark.usefixtures("_in_torch")
def test_sizes_that_run_much_longer_than_their_launch_are_not_captured(folder: Path) -> None:
    """The largest size tells how long others run: of 64, 32 and 16 tokens, these of 16 alone."""
    runner, capture = start_pooled(folder, 4, 40, **SMALL), FakeCapture()
    capture.times_s = 0.1, 0.8
    with_graphs(runner, capture).capture()
    assert len(capture.graphs) == 2


def test_large_sizes_have_a_graph_for_fewer_sequences_too() -> None:
    assert nums_of_sequences(16384, 1024) == [128, 512]
    assert nums_of_sequences(2048, 1024) == [16, 64]
    assert nums_of_sequences(1024, 1024) == [32]
    assert nums_of_sequences(16384, 30) == [31], "no step has more"


@pytest.mark.cpu
def test_a_graph_fits_as_many_sequences_as_it_has_but_for_one_of_padding(attention: ChunkGraphAttention) -> None:
    assert attention.fits(np.ones(len(attention.starts) - 2, np.int64))
    assert not attention.fits(np.ones(len(attention.starts) - 1, np.int64))


@pytest.mark.cpu
@given(data=st.data())
def test_rows_of_padding_belong_to_short_sequences(data: st.DataObject, attention: ChunkGraphAttention) -> None:
    """Of no slot, and all rows belong to a sequence."""
    room = len(attention.starts) - 2
    counts = data.draw(st.lists(st.integers(1, 40), max_size=room).filter(lambda some: sum(some) <= 512))
    attention.fill(np.array(counts, np.int64), None)
    metadata = attention.rows
    starts, count = attention.starts.tolist(), len(counts)
    assert starts == sorted(starts) and starts[: count + 1] == [0, *np.cumsum(counts).tolist()] and starts[-1] == 512
    owners = np.repeat(np.arange(count), counts).tolist()
    assert metadata.slots.tolist() == owners + [-1] * (512 - len(owners))
    padding = np.diff(starts[count:])
    assert padding[:-1].max(initial=0) <= PADDING_ROWS
    if (512 - len(owners)) <= PADDING_ROWS * (room + 1 - count):
        assert padding.max() <= PADDING_ROWS


@pytest.fixture(scope="module")
def attention(folder: Path) -> ChunkGraphAttention:
    runner = start_pooled(folder, 30, 40, **SMALL)
    [num], positions = nums_of_sequences(512, 30), torch.zeros(512, dtype=torch.int64)
    tables = torch.zeros((num, 32), dtype=torch.int32)
    return ChunkGraphAttention(runner.model, runner.pool, positions, tables, num)


# --- on a GPU

MOST_TEXTS, MOST_TOKENS, STEP_TOKENS = 48, 600, 4608
BUDGETS = (STEP_TOKENS, 3000, 1000, 70)  # full steps, and between sizes


@pytest.fixture
def _always_useful(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the device took at captures: other tests run beside these."""
    monkeypatch.setattr(packed_graphs, "USEFUL", 1e9)
    monkeypatch.setattr(packed_graphs, "SMALL_PADDING", 1.0)


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.cuda(NO_GPU(pytest.mark.usefixtures("_always_useful")(test)))


def mixed_texts() -> list[list[int]]:
    lengths = np.random.default_rng(5).integers(1, MOST_TOKENS + 1, MOST_TEXTS - 4).tolist()
    return texts_of(1, 2, 599, 600, *lengths)


def start_both(folder: Path, **fields: Any) -> tuple[Runner, Runner]:
    options = {"device": "cuda", "max_num_batched_tokens": STEP_TOKENS} | fields
    eager = start_pooled(folder, MOST_TEXTS, MOST_TOKENS, enforce_eager=True, **options)
    graphs = start_pooled(folder, MOST_TEXTS, MOST_TOKENS, **options)
    assert steps_of(eager).graphs is None and steps_of(graphs).graphs is not None
    return eager, graphs


def compare(eager: Runner, runner: Runner, monkeypatch: pytest.MonkeyPatch, tolerance: float) -> None:
    """Every step is a graph."""
    graphs, texts = steps_of(runner).graphs, mixed_texts()
    assert graphs is not None
    were_graphs = count_replays(graphs, monkeypatch)
    for budget in BUDGETS:
        expected = vectors(eager, texts, budget)
        assert_alike(vectors(runner, texts, budget), expected, tolerance)
    total = sum(map(len, texts))
    assert len(were_graphs) == sum(-(-total // budget) for budget in BUDGETS) and all(were_graphs)


@on_gpu
@pytest.mark.parametrize("pooling", [LAST, MEAN, ALL])
def test_graphs_have_the_numbers_of_eager_steps(pooling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = LLAMA | {"max_position_embeddings": 1024, "head_dim": 32}
    Tiny("qwen3-model", Qwen3Config, Qwen3Model, fields).save(tmp_path)
    eager, runner = start_both(tmp_path, dtype="float32", pooler_config=pooling)
    compare(eager, runner, monkeypatch, 2e-4)
    if pooling == LAST:  # after prefix hits
        texts = mixed_texts()
        cached = [len(text) // 2 // 16 * 16 for text in texts]
        assert_alike(vectors(runner, texts, 1000, cached), vectors(eager, texts, STEP_TOKENS), 2e-4)
    runner.release_memory()
    runner.reclaim_memory()
    graphs = steps_of(runner).graphs
    assert graphs is not None, "captured again"
    compare(eager, runner, monkeypatch, 2e-4)


@on_gpu
@pytest.mark.parametrize("pooling", [LAST, MEAN])
def test_graphs_in_bfloat16_have_the_numbers_of_eager_steps(
    pooling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With heads of 128, whose attention on Hopper is a kernel of its own."""
    fields = LLAMA | {"max_position_embeddings": 1024, "head_dim": 128, "initializer_range": 0.05}
    Tiny("qwen3-model", Qwen3Config, Qwen3Model, fields).save(tmp_path)
    eager, runner = start_both(tmp_path, dtype="bfloat16", pooler_config=pooling)
    compare(eager, runner, monkeypatch, 3e-2)


@on_gpu
@pytest.mark.parametrize("name", ["llama-classes", "mistral-score"])
def test_graphs_of_classifiers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BY_NAME[name].save(tmp_path)
    options = {"device": "cuda", "dtype": "float32", "task": "classify", "max_num_batched_tokens": 2048}
    eager = start_pooled(tmp_path, 16, 128, enforce_eager=True, **options)
    runner = start_pooled(tmp_path, 16, 128, **options)
    graphs, texts = steps_of(runner).graphs, texts_of(1, 3, 128, 77, 60, 61, 62, 100)
    assert graphs is not None
    were_graphs = count_replays(graphs, monkeypatch)
    for budget in (2048, 100):
        assert_alike(vectors(runner, texts, budget), vectors(eager, texts, budget))
    assert were_graphs and all(were_graphs)
