"""Log-probabilities against the reference in float64: ties, strided rows, rows without a request."""

import pytest
import torch

from blockyard.kernels.sampling import logprobs as file
from blockyard.kernels.sampling.logprobs import gather_logprobs
from blockyard.kernels.sampling.sampling_references import gather_logprobs_reference
from blockyard.kernels.sampling.sampling_state import LogprobsTensors

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_SPAN", 16)
    monkeypatch.setattr(file, "_SPANS", 8)
    torch.manual_seed(4)


def scores(rows: int, most: int, dtype: torch.dtype = torch.float32) -> LogprobsTensors:
    """Outputs filled with NaN."""

    def full(value: float, kind: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=kind, device=DEVICE)

    nan = float("nan")
    return LogprobsTensors(
        full(nan, dtype, rows),
        full(-7, torch.int32, rows),
        full(-7, torch.int32, rows, most),
        full(nan, dtype, rows, most),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [300, 5])
@pytest.mark.parametrize("ties", [True, False])
def test_scores_are_those_of_the_reference(vocab: int, ties: bool, dtype: torch.dtype) -> None:
    logits = torch.randn(5, vocab + 3, device=DEVICE) * 2
    logits = (logits.round() if ties else logits).to(dtype)[:, :vocab]
    logits[1, 2] = float("-inf")
    slots = torch.tensor([3, 0, -1, 1, 2], device=DEVICE)
    num_top = torch.tensor([7, -1, 0, 4], dtype=torch.int32, device=DEVICE)  # slot 1 requests none
    tokens = torch.randint(0, vocab, (5,), device=DEVICE)
    got, want = scores(5, 6), scores(5, 6, torch.float64)
    gather_logprobs(logits, slots, tokens, num_top, got)
    gather_logprobs_reference(logits.double(), slots, tokens, num_top, want)
    assert torch.equal(got.rank, want.rank)
    assert torch.equal(got.top_ids, want.top_ids)
    assert (got.top_ids[0, :4] >= 0).all()
    close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
    torch.testing.assert_close(got.logprob.double(), want.logprob, **close)
    torch.testing.assert_close(got.top_logprobs.double(), want.top_logprobs, **close)


def test_what_does_not_fit_is_refused() -> None:
    logits, rows = torch.randn(2, 30, device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="up to 20"):
        gather_logprobs(logits, rows, rows, rows.int(), scores(2, 21))
    with pytest.raises(ValueError, match="rank"):
        gather_logprobs(logits, rows, rows, rows.int(), LogprobsTensors(*(getattr(scores(n, 3), k) for n, k in
                     ((2, "logprob"), (3, "rank"), (2, "top_ids"), (2, "top_logprobs")))))  # fmt: skip
