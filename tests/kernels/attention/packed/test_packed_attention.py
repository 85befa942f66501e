"""Packed attention in Triton against its reference in float64, and the reference against torch's own attention."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.kernels.attention.packed.packed_attention import packed_attention, packed_attention_reference
from blockyard.kernels.attention.score_rules import ScoreRules

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the difference over the norm
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
UNLIKE = [3, 0, 1, 70, 0, 16, 131, 2, 64]  # lengths of sequences


def _packed(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, behind: int = 5
) -> tuple[Tensor, Tensor]:
    """Random rows, with NaN in the padding of each row and behind the last sequence; starts."""
    torch.manual_seed(sum(lengths) + head_dim)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    width = (heads + 2 * kv_heads) * head_dim
    rows = torch.full((sum(lengths) + behind, width + 8), float("nan"), dtype=dtype, device=DEVICE)
    rows[: sum(lengths), :width] = torch.randn(sum(lengths), width, device=DEVICE).to(dtype)
    return rows[:, :width].unflatten(1, (-1, head_dim)), starts


def _check(qkv: Tensor, starts: Tensor, rules: ScoreRules, heads: int, longest: int) -> None:
    out = torch.full((len(qkv), heads * qkv.shape[2]), 7.0, dtype=qkv.dtype, device=DEVICE)
    packed_attention(qkv, starts, rules, heads, longest, out)
    known = int(starts[-1])
    expected = packed_attention_reference(qkv[:known].double(), starts, rules, heads)
    assert float((out[:known].double() - expected).norm()) <= ERROR[qkv.dtype] * max(float(expected.norm()), 1e-6)
    assert bool((out[known:] == 7.0).all()), "rows of no sequence are not written"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 72, 80, 128])
def test_sequences_of_unlike_length(head_dim: int, dtype: torch.dtype) -> None:
    qkv, starts = _packed(UNLIKE, 3, 3, head_dim, dtype)
    _check(qkv, starts, ScoreRules(scale=head_dim**-0.5, both_sides=True), 3, max(UNLIKE))


@pytest.mark.parametrize("window", [1, 2, 17, 64, 65, 500])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_windows(window: int, head_dim: int) -> None:
    qkv, starts = _packed(UNLIKE, 2, 2, head_dim, torch.float32)
    _check(qkv, starts, ScoreRules(scale=0.2, both_sides=True, window=window), 2, max(UNLIKE))


@pytest.mark.parametrize("lengths", [[1], [0], [0, 0, 1], [16] * 9, [17, 33], [256, 1]], ids=str)
def test_few_sequences_and_short_ones(lengths: list[int]) -> None:
    qkv, starts = _packed(lengths, 2, 1, 32, torch.float32)
    _check(qkv, starts, ScoreRules(scale=0.3, both_sides=True), 2, max(lengths))


@pytest.mark.parametrize("lengths", [[130, 7], [0, 128, 0, 1], [0]], ids=str)
def test_padded_steps(lengths: list[int]) -> None:
    """Rows of no sequence, and empty sequences that only stand for room."""
    qkv, starts = _packed([*lengths, *[0] * 40], 1, 1, 32, torch.float32, behind=700)
    _check(qkv, starts, ScoreRules(scale=0.3, both_sides=True), 1, 512)


@pytest.mark.parametrize("heads", [(4, 1), (6, 2)])
def test_shared_heads(heads: tuple[int, int]) -> None:
    qkv, starts = _packed([40, 9], *heads, 256, torch.float32)
    _check(qkv, starts, ScoreRules(scale=0.05, both_sides=True, window=12), heads[0], 40)


def test_many_sequences() -> None:
    """4,000 on a GPU, where each program searches for its sequence."""
    lengths = torch.randint(0, 60, (4000 if DEVICE == "cuda" else 150,), generator=torch.manual_seed(5)).tolist()
    qkv, starts = _packed(lengths, 1, 1, 32, torch.float16)
    _check(qkv, starts, ScoreRules(scale=0.2, both_sides=True), 1, max(lengths))


def test_reference_against_torch() -> None:
    qkv, starts = _packed([12, 30], 4, 2, 16, torch.float32)
    got = packed_attention_reference(qkv[:42], starts, ScoreRules(scale=0.25, both_sides=True, window=6), 4)
    for start, end in ((0, 12), (12, 42)):
        q, k, v = qkv[start:end].transpose(0, 1).split((4, 2, 2))
        place = torch.arange(end - start, device=DEVICE)
        near = (place[:, None] - place).abs() < 6
        own = F.scaled_dot_product_attention(q[None], k[None], v[None], near, scale=0.25, enable_gqa=True)
        torch.testing.assert_close(got[start:end], own[0].transpose(0, 1).flatten(1), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 5}, "not 5 of q"),
        ({"rules": ScoreRules(scale=1.0, both_sides=True, soft_cap=3.0)}, "soft caps"),
        ({"starts": torch.zeros(2, dtype=torch.int64)}, "starts"),
        ({"qkv": torch.zeros(4, 6, 12)}, "heads of 12"),
    ],
)
def test_refuses(changes: dict[str, Any], words: str) -> None:
    given = {
        "qkv": torch.zeros(4, 6, 16, device=DEVICE),
        "starts": torch.tensor([0, 4], dtype=torch.int32, device=DEVICE),
        "rules": ScoreRules(scale=1.0, both_sides=True),
        "num_heads": 2,
        "max_seq_len": 4,
        "out": torch.zeros(4, 32, device=DEVICE),
    } | {key: value.to(DEVICE) if isinstance(value, Tensor) else value for key, value in changes.items()}
    with pytest.raises(ValueError, match=words):
        packed_attention(**given)
