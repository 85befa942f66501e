"""Masks in host memory against the reference: which rows have one, what they leave, and the records of tokens."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blockyard.kernels.sampling import penalize_logits as file
from blockyard.kernels.sampling import wait_for_masks as wait_file
from blockyard.kernels.sampling.penalize_logits import penalize_logits
from blockyard.kernels.sampling.sampling_references import (
    penalize_logits_reference,
    publish_sampled_reference,
    wait_for_masks_reference,
)
from blockyard.kernels.sampling.sampling_state import MaskState, MaskTensors, RowMasks, make_logits_edits
from blockyard.kernels.sampling.wait_for_masks import publish_sampled, wait_for_masks
from blockyard.services.gpu_worker.structured_output.mask_memory import record_of, tag_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB, NUM_SLOTS = 300, 6
SLOTS = torch.tensor([3, 0, -1, 1, 2, 5], device=DEVICE)
INDEX = torch.tensor([8, 5, 0, 7, 4, 9], device=DEVICE)


def host(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype, pin_memory=DEVICE.type == "cuda")


@pytest.fixture
def masks() -> MaskTensors:
    """Slot 0 has no constraint, 1 and 5 have their masks, 2 one of an earlier owner, 3 one of another token."""
    made = MaskTensors(
        torch.tensor([0, 11, 12, 13, 14, 15], dtype=torch.int32, device=DEVICE),
        torch.zeros(NUM_SLOTS, dtype=torch.int32, device=DEVICE),
        host(NUM_SLOTS, 2, -(-VOCAB // 32), dtype=torch.int32),
        host(NUM_SLOTS, 2, dtype=torch.int64),
        host(NUM_SLOTS, dtype=torch.int64),
    )
    made.words.copy_(torch.randint(-(2**31), 2**31 - 1, made.words.shape, generator=torch.Generator().manual_seed(3)))
    made.tags[1, 1], made.tags[5, 1] = tag_of(11, 7), tag_of(15, 9)
    made.tags[2, 0], made.tags[3, 0], made.tags[3, 1] = tag_of(4, 4), tag_of(13, 6), tag_of(13, 8)
    return made


def blank() -> Tensor:
    return torch.full((len(SLOTS), -(-VOCAB // 32)), 5, dtype=torch.int32, device=DEVICE)


def rows_of(masks: MaskTensors, polls: int = 3) -> RowMasks:
    rows = RowMasks(masks, torch.full((len(SLOTS),), -1, dtype=torch.int32, device=DEVICE), blank(), VOCAB)
    wait_for_masks(SLOTS, INDEX, masks, rows.states, rows.words, polls)
    return rows


def states_of(masks: MaskTensors, polls: int = 3) -> Tensor:
    return rows_of(masks, polls).states


def test_a_mask_of_another_owner_or_token_is_missing(masks: MaskTensors) -> None:
    missing, free, masked = MaskState.MISSING, MaskState.FREE, MaskState.MASKED
    expected = [missing, free, free, masked, missing, masked]
    rows = rows_of(masks)
    assert rows.states.tolist() == expected
    states, words = torch.full((len(SLOTS),), -1, dtype=torch.int32, device=DEVICE), blank()
    wait_for_masks_reference(SLOTS, INDEX, masks, states, words)
    assert states.tolist() == expected
    assert torch.equal(rows.words, words)
    assert torch.equal(words[3].cpu(), masks.words[1, 1]) and torch.equal(words[0], blank()[0])


def test_a_slot_that_is_late_is_looked_at_once_until_its_mask_is_there(masks: MaskTensors) -> None:
    """A billion reads would not end in this test."""
    missing, masked = MaskState.MISSING, MaskState.MASKED
    states_of(masks)
    assert masks.late.tolist() == [0, 0, 1, 1, 0, 0]
    assert [states_of(masks, 10**9)[row] for row in (0, 3, 4)] == [missing, masked, missing]
    masks.tags[2, 0], masks.tags[3, 0] = tag_of(12, 4), tag_of(13, 8)
    assert [states_of(masks, 10**9)[row] for row in (0, 3, 4)] == [masked, masked, masked]
    assert masks.late.tolist() == [0, 0, 0, 0, 0, 0]
    for index in (INDEX, INDEX + 1):
        for wait in (wait_for_masks_reference, lambda *args: wait_for_masks(*args, 3)):
            masks.late.fill_(9)
            wait(SLOTS, index, masks, torch.zeros(len(SLOTS), dtype=torch.int32, device=DEVICE), blank())
            assert masks.late.tolist() == ([9, 0, 0, 0, 9, 0] if index is INDEX else [9, 1, 1, 1, 9, 1])


@pytest.mark.parametrize("listed", [False, True])
def test_masked_logits_are_those_of_the_reference(
    masks: MaskTensors, listed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_TILE", 256)
    monkeypatch.setattr(wait_file, "_WORDS_TILE", 4)  # several tiles
    torch.manual_seed(1)
    edits = make_logits_edits(NUM_SLOTS, 5, 8, VOCAB, DEVICE)
    edits.row[:] = torch.tensor([0, 3, 1, 2, -1, 4])
    if listed:
        edits.num_listed[1] = 3
        edits.listed[1, :3] = torch.tensor([2, 40, 299])
        edits.bias[1, :3] = torch.tensor([5.0, 1.0, float("-inf")])
        edits.repetition[5], edits.counts[4, 7] = 1.5, 2
    logits = torch.randn(len(SLOTS), VOCAB, device=DEVICE)
    before = logits.clone()
    rows = rows_of(masks)
    penalize_logits(logits, SLOTS, INDEX, edits, rows)
    seen = edits.logits.clone()
    edits.logits.fill_(0)
    penalize_logits_reference(logits, SLOTS, INDEX, edits, rows)
    assert torch.equal(logits, before)
    assert torch.equal(seen.isinf(), edits.logits.isinf())
    torch.testing.assert_close(seen, edits.logits)
    assert bool(seen[1].isinf().all()) and not seen[0].isinf().any() and bool(seen[3].isinf().any())


def test_masks_allow_no_token_behind_the_vocabulary(masks: MaskTensors) -> None:
    """VOCAB is no multiple of 32, and masks have bits behind it."""
    masks.words.fill_(-1)
    edits, more = make_logits_edits(NUM_SLOTS, 5, 8, VOCAB + 60, DEVICE), VOCAB + 60
    edits.row[:] = torch.tensor([0, 3, 1, 2, -1, 4])
    logits, rows = torch.randn(len(SLOTS), more, device=DEVICE), rows_of(masks)
    edits.num_listed[1] = 1
    edits.listed[1, 0] = VOCAB + 1
    want = replace(edits, logits=edits.logits.clone())
    penalize_logits_reference(logits, SLOTS, INDEX, want, rows)
    penalize_logits(logits, SLOTS, INDEX, edits, rows)
    assert torch.equal(edits.logits, want.logits)
    assert torch.equal(edits.logits[3, :VOCAB], logits[3, :VOCAB]) and bool(edits.logits[3, VOCAB:].isneginf().all())
    assert torch.equal(edits.logits[0], logits[1]), "a row without a constraint"


def test_tokens_of_masked_rows_are_published(masks: MaskTensors) -> None:
    states = states_of(masks)
    tokens = torch.tensor([1, 2, 3, 299, 5, 6], device=DEVICE)
    best = torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, float("-inf")], device=DEVICE)
    publish_sampled(tokens, best, SLOTS, INDEX, masks, states)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    expected = torch.zeros(NUM_SLOTS, dtype=torch.int64)
    expected[1] = record_of(11, 7, 299)
    assert torch.equal(masks.sampled.cpu(), expected)
    masks.sampled.zero_()
    publish_sampled_reference(tokens, best, SLOTS, INDEX, masks, states)
    assert torch.equal(masks.sampled.cpu(), expected)
