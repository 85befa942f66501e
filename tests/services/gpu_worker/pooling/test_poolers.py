"""Poolers against sentence-transformers' own Pooling, whole and in chunks, with other sequences between."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor

from blockyard.services.gpu_worker.pooling.chunks import PooledChunk, PooledSequence
from blockyard.services.gpu_worker.pooling.poolers import Pooler, RowsNeeded, make_poolers
from blockyard.shared.config.pooling.modes import OF_SENTENCES, PoolingMode

WIDTH = 6


def _chunk(parts: Sequence[tuple[PooledSequence, Tensor, list[int]]]) -> PooledChunk:
    ids = np.array([one for _, _, ids in parts for one in ids], np.int64)
    rows = torch.cat([rows for _, rows, _ in parts] + [torch.full((3, WIDTH), float("nan"))])
    return PooledChunk.of(rows, [sequence for sequence, _, _ in parts], ids)


def _rows(pooler: Pooler, chunk: PooledChunk) -> list[Tensor]:
    """The rows of each sequence that is complete."""
    rows, counts = pooler.add(chunk)
    return list(rows.split([1] * len(rows) if counts is None else counts.tolist()))


def _pool(pooler: Pooler, texts: Sequence[Tensor], cuts: Sequence[Sequence[int]], skip: int) -> list[Tensor]:
    """The results of texts that are computed in parts of `cuts` rows, one part of each in a step."""
    found: dict[int, Tensor] = {}
    done = [0] * len(texts)
    for counts in itertools.zip_longest(*cuts, fillvalue=0):
        parts = []
        for slot, (text, count) in enumerate(zip(texts, counts, strict=True)):
            if count:
                sequence = PooledSequence(slot, done[slot], count, len(text), skip)
                parts.append((sequence, text[done[slot] : done[slot] + count], [slot] * count))
                done[slot] += count
        complete = [sequence.slot for sequence, _, _ in parts if sequence.is_complete]
        found |= dict(zip(complete, _rows(pooler, _chunk(parts)), strict=True))
    return [found[slot] for slot in range(len(texts))]


def _cut(total: int, rng: np.random.Generator, whole: bool) -> list[int]:
    places = [] if whole or total == 1 else sorted(rng.choice(np.arange(1, total), min(2, total - 1), replace=False))
    return np.diff([0, *places, total]).tolist()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize(
    "modes", [*([mode] for mode in OF_SENTENCES), [PoolingMode.CLS, PoolingMode.MEAN, PoolingMode.MAX]]
)
def test_as_sentence_transformers_pools(modes: list[PoolingMode], skip: int, whole: bool) -> None:
    rng = np.random.default_rng(3)
    lengths = [3, 9, 17, 4]
    texts = [torch.randn(n, WIDTH, generator=torch.manual_seed(n)) for n in lengths]
    theirs = Pooling(WIDTH, [mode.value for mode in modes], include_prompt=not skip)
    got = _pool(make_poolers(modes), texts, [_cut(n, rng, whole) for n in lengths], skip)
    for text, row in zip(texts, got, strict=True):
        features = {"token_embeddings": text[None], "attention_mask": torch.ones(1, len(text), dtype=torch.int64)}
        if skip:
            features["prompt_length"] = skip  # type: ignore[assignment]
        expected = theirs(features)["sentence_embedding"]
        torch.testing.assert_close(row, expected, atol=1e-6, rtol=1e-5)


@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    mode=st.sampled_from([*OF_SENTENCES, PoolingMode.ALL, PoolingMode.STEP]),
)
def test_chunks_do_not_matter(seed: int, lengths: list[int], mode: PoolingMode) -> None:
    rng = np.random.default_rng(seed)
    texts = [torch.from_numpy(rng.standard_normal((n, WIDTH)).astype(np.float32)) for n in lengths]
    whole = _pool(make_poolers([mode], 1), texts, [[n] for n in lengths], 0)
    parts = _pool(make_poolers([mode], 1), texts, [_cut(n, rng, False) for n in lengths], 0)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_tokens_and_steps() -> None:
    text = torch.randn(5, WIDTH)
    sequence = PooledSequence(0, 0, 5, 5)
    chunk = _chunk([(sequence, text, [4, 9, 4, 9, 4])])
    [rows] = _rows(make_poolers([PoolingMode.ALL]), chunk)
    assert torch.equal(rows, text)
    [steps] = _rows(make_poolers([PoolingMode.STEP], 9), chunk)
    assert torch.equal(steps, text[[1, 3]])
    [none] = _rows(make_poolers([PoolingMode.STEP], 8), chunk)
    assert none.shape == (0, WIDTH)


@pytest.mark.parametrize("mode", [PoolingMode.MEAN, PoolingMode.MAX, PoolingMode.CLS, PoolingMode.ALL])
def test_a_preempted_sequence_starts_over(mode: PoolingMode) -> None:
    text, pooler = torch.randn(6, WIDTH), make_poolers([mode])
    assert _rows(pooler, _chunk([(PooledSequence(0, 0, 4, 6), text[:4] + 50, [0] * 4)])) == []
    pooler.drop(0)
    [got] = _rows(pooler, _chunk([(PooledSequence(0, 0, 6, 6), text, [0] * 6)]))
    [expected] = _rows(make_poolers([mode]), _chunk([(PooledSequence(1, 0, 6, 6), text, [0] * 6)]))
    assert torch.equal(got, expected)


def test_sums_of_many_half_precision_rows() -> None:
    """In float32: half precision would lose the last rows."""
    text = torch.ones(5000, WIDTH, dtype=torch.bfloat16)
    chunk = PooledChunk.of(text, [PooledSequence(0, 0, 5000, 5000)], np.zeros(5000, np.int64))
    [row] = _rows(make_poolers([PoolingMode.MEAN]), chunk)
    assert row.dtype == torch.float32
    torch.testing.assert_close(row, torch.ones(1, WIDTH))


def test_rows_needed() -> None:
    assert make_poolers([PoolingMode.LAST]).rows is RowsNeeded.LAST
    assert make_poolers([PoolingMode.LAST, PoolingMode.MEAN]).rows is RowsNeeded.ALL
