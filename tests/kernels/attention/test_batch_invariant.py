"""Batch-invariant attention: the same bits as decode, as prefill, in chunks and beside other sequences."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from blockyard.kernels.attention import batch_invariant as file
from blockyard.kernels.attention.batch_invariant import batch_invariant_attention
from blockyard.kernels.attention.paged_prefill import paged_prefill_reference
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the difference over the norm
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
HEADS, DIM, SIZE, LENGTH, LONGEST = 3, 24, 16, 150, 256


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_MIN_SPLIT_LEN", 64)
    monkeypatch.setattr(file, "_MAX_SPLITS", 4)


@pytest.fixture(autouse=True)
def products_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter computes `tl.dot` with numpy's BLAS, where on some CPUs a row's bits depend on its index."""

    def matmul(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: npt.DTypeLike = None) -> npt.NDArray[Any]:
        return np.einsum("...ik,...kj->...ij", a.astype(dtype), b.astype(dtype))

    if DEVICE == "cpu":
        monkeypatch.setattr(np, "matmul", matmul)


class Sequence:
    """All q of a sequence, and its K and V in a pool."""

    def __init__(
        self,
        dtype: torch.dtype,
        window: int | None,
        soft_cap: float | None,
        head_dim: int,
        chunked: bool,
        has_sinks: bool,
    ) -> None:
        torch.manual_seed(5)
        self.q = torch.randn(LENGTH, HEADS, head_dim, device=DEVICE).to(dtype) * (DIM / head_dim) ** 0.5
        self.layer = torch.randn(24, 2, 1, SIZE, head_dim, device=DEVICE).to(dtype)
        self.tables = torch.randperm(24).int().view(2, 12).to(DEVICE)
        sinks = torch.tensor([-1.0, 2.0, 4.0], device=DEVICE) if has_sinks else None
        self.rules = ScoreRules(scale=0.3, window=window, soft_cap=soft_cap, chunked=chunked, sinks=sinks)

    def rows(self, counts: list[tuple[int, int]], are_decodes: bool = False) -> Tensor:
        """Outputs for (first position, rows) pairs, in the two slots alternately; slot 0 is the sequence under test."""
        positions = torch.cat([torch.arange(a, a + n) for a, n in counts]).to(DEVICE)
        slots = torch.cat([torch.full((n,), i % 2) for i, (_, n) in enumerate(counts)]).to(DEVICE)
        starts = torch.tensor([0, *(n for _, n in counts)]).cumsum(0).int().to(DEVICE)
        seqs = PagedKVMetadata(slots, positions, self.tables)
        q = self.q[positions].contiguous()
        out = torch.full((len(q), q[0].numel()), float("nan"), dtype=q.dtype, device=DEVICE)
        batch_invariant_attention(q, self.layer, seqs, starts, self.rules, LONGEST, out, are_decodes)
        want = paged_prefill_reference(q.double(), self.layer.double(), seqs, starts, self.rules)
        assert float((out.double() - want).norm() / want.norm()) <= ERROR[q.dtype]
        return out


@pytest.mark.parametrize(
    ("dtype", "window", "soft_cap", "head_dim", "chunked", "has_sinks"),
    [
        (DTYPES[0], None, None, DIM, False, False),
        (DTYPES[-1], 70, None, DIM, False, False),
        (DTYPES[-1], 70, None, DIM, False, True),
        (DTYPES[-1], None, None, DIM, False, True),
        (DTYPES[-1], None, None, DIM, False, False),
        (DTYPES[-1], None, 2.0, DIM, False, False),
        (DTYPES[-1], None, None, 512, False, False),
        *([(DTYPES[0], None, None, 512, False, False)] if DEVICE == "cuda" else []),  # with other tiles
        (DTYPES[-1], 64, None, DIM, True, False),
        (DTYPES[0], 50, None, DIM, True, False),
    ],
)
def test_the_same_bits_however_it_is_computed(
    dtype: torch.dtype, window: int | None, soft_cap: float | None, head_dim: int, chunked: bool, has_sinks: bool
) -> None:
    it = Sequence(dtype, window, soft_cap, head_dim, chunked, has_sinks)
    whole = it.rows([(0, LENGTH)])
    chunks = [it.rows([(at, n)]) for at, n in ((0, 61), (121, LENGTH - 121))]
    assert torch.equal(torch.cat(chunks), torch.cat((whole[:61], whole[121:])))
    company = it.rows([(130, 20), (3, 1), (64, 9), (140, 2)])
    assert torch.equal(company[:20], whole[130:])
    assert torch.equal(company[21:30], whole[64:73])
    for at in (63, 64):
        assert torch.equal(it.rows([(at, 1)], are_decodes=True)[0], whole[at])
    together = it.rows([(149, 1), (12, 1)], are_decodes=True)
    assert torch.equal(together[0], whole[149])


def test_a_row_of_no_slot_is_zero() -> None:
    layer = torch.randn(4, 2, 1, SIZE, DIM, device=DEVICE)
    seqs = PagedKVMetadata(
        torch.tensor([-1], device=DEVICE),
        torch.tensor([5], device=DEVICE),
        torch.zeros(1, 4, dtype=torch.int32, device=DEVICE),
    )
    q, starts = torch.randn(1, HEADS, DIM, device=DEVICE), torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    for are_decodes in (True, False):
        out = torch.full((1, HEADS * DIM), float("nan"), device=DEVICE)
        batch_invariant_attention(q, layer, seqs, starts, ScoreRules(scale=1.0), 64, out, are_decodes)
        assert not out.any()


def test_splits_depend_only_on_the_longest_sequence() -> None:
    assert [file.split_len(n, 4) for n in (1, 256, 257, 1024)] == [64, 64, 128, 256]
