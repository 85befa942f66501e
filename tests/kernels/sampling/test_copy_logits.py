"""Logits of the rows that the host samples, against the reference."""

import pytest
import torch

from blockyard.kernels.sampling import copy_logits as file
from blockyard.kernels.sampling.copy_logits import copy_logits
from blockyard.kernels.sampling.sampling_references import copy_logits_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE.type == "cuda" else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 300, 513])
def test_rows_are_copied_where_asked(dtype: torch.dtype, vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_TILE", 256)
    logits = torch.randn(4, vocab + 3, device=DEVICE).to(dtype)[:, :vocab]
    slots = torch.tensor([5, -1, 0, 3], device=DEVICE)
    row = torch.tensor([2, -1, -1, -1, 1, 0], dtype=torch.int32, device=DEVICE)  # slot 4 is not in this step
    want, got = (torch.full((3, vocab), 7.0, device=DEVICE) for _ in range(2))
    copy_logits_reference(logits, slots, row, want)
    copy_logits(logits, slots, row, got)
    assert torch.equal(got, want)
    wide, more = (torch.full((3, vocab + 300), 7.0, device=DEVICE) for _ in range(2))
    copy_logits_reference(logits, slots, row, wide)
    copy_logits(logits, slots, row, more)
    assert torch.equal(more, wide) and torch.equal(more[[0, 2], :vocab], got[[0, 2]])
    assert bool(more[[0, 2], vocab:].isneginf().all()), "tokens that no logit is of"
    assert (
        torch.equal(got[0], logits[0].float()) and torch.equal(got[2], logits[2].float()) and bool((got[1] == 7).all())
    )


def test_what_does_not_fit_is_refused() -> None:
    slots, row = torch.zeros(2, dtype=torch.int64, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="out"):
        copy_logits(torch.zeros(2, 11, device=DEVICE), slots, row, torch.zeros(1, 10, device=DEVICE))
    with pytest.raises(ValueError, match="row"):
        copy_logits(torch.zeros(2, 11, device=DEVICE), slots, row.long(), torch.zeros(1, 11, device=DEVICE))
