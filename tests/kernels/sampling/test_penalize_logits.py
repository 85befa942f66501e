"""Penalties, bias and bans against the reference in float64; counting."""

from dataclasses import replace

import pytest
import torch

from blockyard.kernels.sampling import penalize_logits as file
from blockyard.kernels.sampling.penalize_logits import count_tokens, penalize_logits
from blockyard.kernels.sampling.sample_tokens import sample_tokens, sample_tokens_reference
from blockyard.kernels.sampling.sampling_references import count_tokens_reference, penalize_logits_reference
from blockyard.kernels.sampling.sampling_state import (
    AdjustedLogits,
    LogitsEdits,
    SamplingTensors,
    count_known,
    make_logits_edits,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]
VOCAB = 300


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_TILE", 256)
    torch.manual_seed(5)


def asked() -> LogitsEdits:
    """Slot 1 is penalised, slot 2 has bias and bans, slot 4 has three allowed tokens; 0 and 3 have no edits."""
    wishes = make_logits_edits(5, 3, 8, VOCAB, DEVICE)
    wishes.logits.fill_(float("nan"))
    wishes.row[:] = torch.tensor([-1, 2, 0, -1, 1])
    wishes.repetition[1], wishes.presence[1], wishes.frequency[1] = 1.3, 0.5, 0.2
    count_known(wishes.counts[2], torch.tensor([5, 5, 9, 280, 280, 280, 11], device=DEVICE), 3)
    for slot, entries in {
        2: [(7, 2.5, 0), (8, float("-inf"), 0), (299, 0.0, 41), (255, 0.0, 40)],
        4: [(3, 0.0, 0), (256, 0.0, 0), (270, -1.0, 0)],
    }.items():
        wishes.num_listed[slot] = len(entries)
        for i, (token, bias, until) in enumerate(entries):
            wishes.listed[slot, i], wishes.bias[slot, i], wishes.until[slot, i] = token, bias, until
    wishes.only_listed[4] = 1
    return wishes


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_those_of_the_reference(dtype: torch.dtype) -> None:
    wishes = asked()
    logits = torch.randn(4, VOCAB + 3, device=DEVICE).to(dtype)[:, :VOCAB]
    before = logits.clone()
    slots, index = torch.tensor([2, -1, 4, 1], device=DEVICE), torch.full((4,), 40, device=DEVICE)
    want = replace(wishes, logits=wishes.logits.double())
    penalize_logits_reference(logits, slots, index, want)
    penalize_logits(logits, slots, index, wishes)
    torch.testing.assert_close(wishes.logits.double(), want.logits, rtol=1e-6, atol=1e-6)
    assert torch.equal(logits, before)
    assert wishes.logits[0, 299] == wishes.logits[0, 8] == float("-inf")
    assert wishes.logits[0, 255] == logits[0, 255]  # its min_tokens are reached
    assert int(wishes.logits[1].isfinite().sum()) == 3


def test_logits_may_be_of_fewer_tokens_than_are_counted() -> None:
    """As in steps whose adapters add no tokens."""
    wishes, fewer = asked(), 299 - 8
    wishes.num_listed[2] = 2  # the others are behind these
    logits = torch.randn(3, fewer, device=DEVICE)
    slots, index = torch.tensor([2, 4, 1], device=DEVICE), torch.full((3,), 40, device=DEVICE)
    want = replace(wishes, logits=wishes.logits.clone())
    penalize_logits_reference(logits, slots, index, want)
    penalize_logits(logits, slots, index, wishes)
    torch.testing.assert_close(wishes.logits[:, :fewer], want.logits[:, :fewer])
    assert not wishes.logits[:, :fewer].isnan().any() and bool(wishes.logits[:, fewer:].isnan().all())


def test_tokens_are_counted_where_asked_and_drawn() -> None:
    wishes = asked()
    want = replace(wishes, counts=wishes.counts.clone())
    slots = torch.tensor([4, 0, -1, 1, 2], device=DEVICE)
    tokens = torch.tensor([3, 4, 5, 280, 7], device=DEVICE)
    best = torch.tensor([1.0, 1.0, 0.0, -2.0, float("nan")], device=DEVICE)
    ready = torch.tensor([0, 1, 1, 1, 1], dtype=torch.int32, device=DEVICE)
    count_tokens(tokens, best, ready, slots, wishes)
    count_tokens_reference(tokens, best, ready, slots, want)
    assert torch.equal(wishes.counts, want.counts)
    assert wishes.counts[2, 280] == 4
    assert wishes.counts[0].sum() == 0
    assert wishes.counts[1].sum() == 0, "the row of a slot that waits"


def test_the_draw_takes_the_adjusted_logits() -> None:
    """For slots with edits; other slots use the raw logits."""
    wishes = asked()
    logits = torch.randn(3, VOCAB).half()
    slots, index = torch.tensor([4, 1, 0]), torch.arange(3)

    def full(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((5,), value, dtype=dtype)

    f32, i32 = torch.float32, torch.int32
    params = SamplingTensors(
        full(1, f32), full(2**30, i32), full(0.9, f32), full(0, f32), torch.randint(0, 2**32, (2, 5)), full(0, i32)
    )
    there = SamplingTensors(*(getattr(params, name).to(DEVICE) for name in params.__slots__))
    tokens, best = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.zeros(3, device=DEVICE)
    on_device = (logits.to(DEVICE), slots.to(DEVICE), index.to(DEVICE))
    penalize_logits(*on_device, wishes)
    sample_tokens(*on_device, there, tokens, best, AdjustedLogits(wishes.row, wishes.logits))
    rows = [logits[i] if wishes.row[s] < 0 else wishes.logits[wishes.row[s]].cpu() for i, s in enumerate(slots)]
    want = sample_tokens_reference(torch.stack([row.double() for row in rows]), slots, index, params)[0]
    assert tokens.tolist() == want.tolist()


def test_what_does_not_fit_is_refused() -> None:
    wishes = make_logits_edits(2, 1, 4, 10, DEVICE)
    slots = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="counts"):
        penalize_logits(torch.zeros(2, 11, device=DEVICE), slots, slots, wishes)
    with pytest.raises(ValueError, match="index"):
        penalize_logits(torch.zeros(2, 10, device=DEVICE), slots, slots.int(), wishes)
    with pytest.raises(ValueError, match="best"):
        count_tokens(slots, slots, slots, slots, wishes)
