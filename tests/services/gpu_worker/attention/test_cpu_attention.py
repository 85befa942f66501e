"""Paged attention of any mixture of decodes and prefills against dense attention, sequence by sequence."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.services.gpu_worker.attention import cpu_attention, cpu_metadata
from blockyard.services.gpu_worker.attention.cpu_attention import GatheredKV
from blockyard.services.gpu_worker.attention.cpu_metadata import CpuMetadataBuilder, length_groups, length_order
from blockyard.services.gpu_worker.kv.pool import KVPool
from blockyard.services.gpu_worker.layers.attention import AttentionShape
from blockyard.services.gpu_worker.models.interface import ModelShape

HEADS, SIZE, BLOCKS = 4, 4, 200


def layer_of(
    kv_heads: int,
    dim: int,
    window: int | None = None,
    soft_cap: float | None = None,
    latent_dim: int | None = None,
    chunked: bool = False,
    sinks: tuple[float, ...] | None = None,
) -> AttentionShape:
    return AttentionShape(
        num_heads=HEADS,
        kv_heads=kv_heads,
        head_dim=dim,
        rules=ScoreRules(
            scale=dim**-0.5,
            window=window,
            soft_cap=soft_cap,
            chunked=chunked,
            sinks=None if sinks is None else torch.tensor(sinks),
        ),
        latent_dim=latent_dim,
    )


SINKS = (0.5, -3.0, 4.0, 100.0)
LAYERS = (  # they differ in what they keep
    layer_of(2, 8),
    layer_of(2, 8, window=6),
    layer_of(1, 12, soft_cap=0.5),
    layer_of(1, 10, window=1, latent_dim=6),
    layer_of(2, 8, window=6, soft_cap=0.5),
    layer_of(1, 12, latent_dim=8),
    layer_of(2, 8, window=6, chunked=True),
    layer_of(2, 8, sinks=SINKS),
    layer_of(2, 8, window=6, sinks=SINKS),
    layer_of(1, 12, soft_cap=0.5, sinks=SINKS),
)


def shape() -> ModelShape:
    return ModelShape(vocab_size=10, max_positions=128, attention=LAYERS)


@dataclass
class Sequence:
    """Dense K and V of each layer, [planes * kv_heads, tokens, dim]."""

    owner: int
    table: np.ndarray
    kv: list[torch.Tensor]
    num_computed: int = 0


def dense(seq: Sequence, layer: int, q: torch.Tensor, begin: int) -> torch.Tensor:
    """q [tokens, heads, dim] at positions from `begin`."""
    it, rules, rows = LAYERS[layer], LAYERS[layer].rules, []
    for i in range(len(q)):
        position = begin + i
        first = 0 if rules.window is None else max(position - rules.window + 1, 0)
        if rules.chunked and rules.window is not None:
            first = position - position % rules.window
        heads = []
        for h in range(HEADS):
            keys = seq.kv[layer][h * it.kv_heads // HEADS, first : position + 1]
            values = keys[:, : it.latent_dim]
            if it.latent_dim is None:
                values = seq.kv[layer][(HEADS + h) * it.kv_heads // HEADS, first : position + 1]
            scores = keys @ q[i, h] * it.head_dim**-0.5
            if rules.soft_cap is not None:
                scores = rules.soft_cap * (scores / rules.soft_cap).tanh()
            powers = scores.double().exp()
            total = powers.sum() + (0 if rules.sinks is None else rules.sinks[h].double().exp())
            heads.append((powers / total).float() @ values)
        rows.append(torch.cat(heads))
    return torch.stack(rows)


class Rig:
    def __init__(self, num: int, seed: int) -> None:
        self.pool = KVPool(shape(), BLOCKS, SIZE, torch.float32, torch.device("cpu"))
        self.planner = CpuMetadataBuilder(self.pool)
        self.random = torch.Generator().manual_seed(seed)
        order = np.random.default_rng(seed).permutation(BLOCKS)[: num * 16].reshape(num, 16)
        self.seqs = [Sequence(i + 1, order[i], self.kv()) for i in range(num)]

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.random)

    def kv(self) -> list[torch.Tensor]:
        """Of 64 tokens."""
        return [self.randn(planes * heads, 64, dim) for planes, heads, dim in (layer.kept for layer in LAYERS)]

    def step(self, counts: list[int]) -> None:
        """Computes these numbers of tokens of each sequence and compares every layer's output."""
        running = [i for i, n in enumerate(counts) if n == 1]
        order = length_order(np.array([self.seqs[i].num_computed + 1 for i in running], np.int64))
        running = [running[i] for i in (range(len(running)) if order is None else order)]
        running += [i for i, n in enumerate(counts) if n > 1]
        if not running:
            return
        seqs, n = [self.seqs[i] for i in running], np.array([counts[i] for i in running])
        begin = np.array([s.num_computed for s in seqs])
        positions = np.concatenate([np.arange(b, b + c) for b, c in zip(begin, n, strict=True)])
        rows = np.repeat(np.arange(len(seqs)), n)
        tables = np.stack([s.table for s in seqs])
        attend = self.planner.attention(
            tables[rows, positions // SIZE],
            positions % SIZE,
            tables,
            n,
            begin + n,
            np.array([s.owner for s in seqs]),
            int((n == 1).sum()),
        )
        for layer in range(len(LAYERS)):
            q = self.randn(len(positions), HEADS, LAYERS[layer].head_dim)
            kv = torch.stack([seqs[r].kv[layer][:, p] for r, p in zip(rows, positions, strict=True)])
            got = attend(layer, torch.cat((q, kv), 1))
            start = 0
            for s, b, c in zip(seqs, begin, n, strict=True):
                want = dense(s, layer, q[start : start + c], int(b))
                torch.testing.assert_close(got[start : start + c], want, atol=1e-5, rtol=1e-4)
                start += c
        for s, c in zip(seqs, n, strict=True):
            s.num_computed += int(c)


@settings(max_examples=40, deadline=None)
@given(
    num=st.integers(1, 4),
    steps=st.lists(
        st.lists(st.sampled_from([0, 1, 1, 1, 1, 2, 5, 9]), min_size=4, max_size=4), min_size=1, max_size=12
    ),
    seed=st.integers(0, 99),
    room=st.sampled_from([0, 3, 64]),
    split_from=st.sampled_from([1, 4, 256]),
)
def test_any_order_of_steps(num: int, steps: list[list[int]], seed: int, room: int, split_from: int) -> None:
    before = cpu_attention.EXTRA_TOKENS, cpu_metadata.SPLIT_FROM
    cpu_attention.EXTRA_TOKENS, cpu_metadata.SPLIT_FROM = room, split_from
    try:
        rig = Rig(num, seed)
        for counts in steps:
            rig.step([min(c, 64 - s.num_computed) for c, s in zip(counts, rig.seqs, strict=False)])
    finally:
        cpu_attention.EXTRA_TOKENS, cpu_metadata.SPLIT_FROM = before


def test_uneven_lengths_are_split_and_even_ones_are_not() -> None:
    even = np.array([200, 900, 500, 1000])
    assert length_order(even) is None
    assert length_groups(even) == [(0, 4)]
    uneven = np.array([4000, 100, 300, 90, 700, 120, 80])
    order = length_order(uneven)
    assert order is not None
    groups = length_groups(uneven[order])
    assert [uneven[order][a:b].tolist() for a, b in groups] == [[80, 90, 100, 120, 300], [700], [4000]]
    assert length_order(np.array([9], np.int64)) is None


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[GatheredKV]:
    """Each time that K and V of a batch are gathered, for one of the 3 kinds of layers without a window."""
    made: list[GatheredKV] = []

    def gather(*args: Any) -> GatheredKV:
        made.append(GatheredKV(*args))
        return made[-1]

    monkeypatch.setattr(cpu_metadata, "GatheredKV", gather)
    return made


def test_decodes_of_one_batch_gather_once(gathered: list[GatheredKV]) -> None:
    rig = Rig(3, 0)
    rig.step([7, 3, 9])
    rig.step([1, 1, 1])
    assert len(gathered) == 3
    for _ in range(20):
        rig.step([1, 1, 1])
    assert len(gathered) == 3
    rig.step([1, 0, 1])  # another batch: gathered anew
    assert len(gathered) == 6


def test_batches_that_run_in_turn_keep_theirs(gathered: list[GatheredKV]) -> None:
    rig = Rig(3, 0)
    rig.planner = CpuMetadataBuilder(rig.pool, num_batches=2)
    rig.step([7, 3, 9])
    rig.step([1, 0, 1])
    rig.step([0, 1, 0])
    assert len(gathered) == 6
    for _ in range(5):
        rig.step([1, 0, 1])
        rig.step([0, 1, 0])
    assert len(gathered) == 6


def test_a_reused_slot_does_not_use_the_cached_kv_of_the_previous_sequence() -> None:
    rig = Rig(2, 0)
    rig.step([5, 5])
    rig.step([1, 1])
    first = rig.seqs[1]
    other = Sequence(99, np.arange(BLOCKS - 16, BLOCKS), rig.kv())
    rig.seqs[1] = other
    rig.step([0, 6])
    rig.seqs[0].num_computed, other.num_computed = 6, 6
    rig.step([1, 1])
    assert first.owner != other.owner


def test_kv_that_is_too_large_is_not_cached(gathered: list[GatheredKV], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "MAX_BYTES", 1000)
    rig = Rig(3, 0)
    rig.step([7, 3, 9])
    for _ in range(5):
        rig.step([1, 1, 1])
    assert not gathered
