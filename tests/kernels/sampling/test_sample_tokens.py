"""Sampled tokens compared with sorting in float64 and with the sampler on the CPU."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from blockyard.kernels.sampling import sample_tokens as file
from blockyard.kernels.sampling.sample_tokens import sample_tokens, sample_tokens_reference
from blockyard.kernels.sampling.sampling_state import AdjustedLogits, SamplingTensors
from blockyard.services.gpu_worker.sampling.topk_topp_sampler import Noise, SamplingLimits, sample_limited

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
SLOTS = 12


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short candidate lists, so that small vocabularies reach every path."""
    for name, value in (
        ("_LANES", 16),
        ("_RUNS", 2),
        ("_CHUNK", 2),
        ("_FEW", 8),
        ("_TILE", 256),
        ("_MAX_SPANS", 16),  # of 16 tokens,
        ("_CANDIDATES", 32),
    ):
        monkeypatch.setattr(file, name, value)
    torch.manual_seed(3)
    yield


def params(**values: float) -> SamplingTensors:
    """Each slot has another seed and choice; `values` hold for all slots."""

    def of(name: str, default: float, dtype: torch.dtype) -> Tensor:
        return torch.full((SLOTS,), values.get(name, default), dtype=dtype)

    key = torch.randint(0, 2**32, (2, SLOTS))
    choice = torch.arange(SLOTS, dtype=torch.int32)
    f32 = torch.float32
    return SamplingTensors(
        of("temperature", 1.0, f32), of("top_k", 2**30, torch.int32), of("top_p", 1.0, f32), of("min_p", 0.0, f32),
        key, choice,
    )  # fmt: skip


def to_device(given: SamplingTensors) -> SamplingTensors:
    return SamplingTensors(*(getattr(given, name).to(DEVICE) for name in given.__slots__))


def run(logits: Tensor, slots: Tensor, index: Tensor, given: SamplingTensors) -> tuple[Tensor, Tensor]:
    tokens = torch.full((len(slots),), -7, dtype=torch.int64, device=DEVICE)
    best = torch.full((len(slots),), float("nan"), device=DEVICE)
    sample_tokens(logits.to(DEVICE), slots.to(DEVICE), index.to(DEVICE), to_device(given), tokens, best)
    return tokens.cpu(), best.cpu()


# temperature, top_k, top_p, min_p
LIMITS = [
    (1.0, 2**30, 1.0, 0.0),
    (0.0, 2**30, 1.0, 0.0),
    (1.0, 2**30, 0.9, 0.0),
    (1.0, 2**30, 1.0, 0.1),
    (0.7, 40, 0.8, 0.01),
    (1.6, 100, 0.7, 0.0),
]


@pytest.mark.parametrize(
    ("vocab", "spread", "dtype"),
    [(421, 4.0, torch.float32), (421, 0.5, DTYPES[-1]), (7, 1.0, torch.float16)],  # peaked, flat, short
)
def test_the_tokens_are_those_of_the_reference(vocab: int, spread: float, dtype: torch.dtype) -> None:
    """All limits in one step, in random slots, with a padding row; rows are strided."""
    given, num = params(), len(LIMITS)
    slots = torch.randperm(SLOTS)[:num]
    for slot, (temperature, top_k, top_p, min_p) in zip(slots.tolist(), LIMITS, strict=True):
        given.temperature[slot], given.top_k[slot] = temperature, top_k
        given.top_p[slot], given.min_p[slot] = top_p, min_p
    slots = torch.cat((slots[:4], torch.tensor([-1]), slots[4:]))
    logits = (torch.randn(num + 1, vocab + 5) * spread).to(dtype)[:, :vocab]
    index = torch.randint(0, 2**17, (num + 1,))
    tokens, best = run(logits, slots, index, given)
    want, values = sample_tokens_reference(logits.double(), slots, index, given)
    assert tokens.tolist() == want.tolist()
    assert best[4] == 0
    assert best.isfinite().all()
    assert best[1] == values[1]


@pytest.mark.parametrize(
    ("chances", "limits"),
    [
        (0.01, {}),
        (0.01, {"top_p": 0.7}),
        (16.0, {"top_p": 0.3}),
        (16.0, {"top_p": 0.6, "min_p": 0.2}),
        (16.0, {"min_p": 0.3}),
    ],
    ids=str,
)
def test_flat_rows(chances: float, limits: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-p rejects several maxima in a row, and rows where no span's bound contains the maximum."""
    monkeypatch.setattr(file, "_EXPECTED_CANDIDATES", chances)
    logits = torch.randn(3, 300) * 0.5
    slots, index = torch.arange(3), torch.arange(3) * 7
    given = params(**limits)
    tokens, best = run(logits, slots, index, given)
    assert tokens.tolist() == sample_tokens_reference(logits.double(), slots, index, given)[0].tolist()
    assert best.isfinite().all()


@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}], ids=str)
def test_adjusted_rows_replace_the_raw_ones(limits: dict[str, float]) -> None:
    logits, instead = torch.randn(3, 300).half(), torch.randn(2, 300) * 3
    slots, index, given = torch.tensor([4, 0, 2]), torch.arange(3), params(**limits)
    row = torch.full((SLOTS,), -1, dtype=torch.int32)
    row[4], row[2] = 1, 0
    tokens, best = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.zeros(3, device=DEVICE)
    sample_tokens(
        logits.to(DEVICE), slots.to(DEVICE), index.to(DEVICE), to_device(given), tokens, best,
        AdjustedLogits(row.to(DEVICE), instead.to(DEVICE)),
    )  # fmt: skip
    want = torch.stack((instead[1], logits[1].float(), instead[0])).double()
    assert tokens.tolist() == sample_tokens_reference(want, slots, index, given)[0].tolist()


@pytest.mark.parametrize("limits", [{"top_p": 0.5}, {"top_k": 40}, {"temperature": 0.0}], ids=str)
def test_equal_logits_stay_together_and_the_lowest_wins(limits: dict[str, float]) -> None:
    logits = torch.randint(-2, 3, (2, 400)).float()
    logits[0] = 0.0
    slots, index = torch.arange(len(logits)), torch.arange(len(logits))
    given = params(**limits)
    tokens, _ = run(logits, slots, index, given)
    assert tokens.tolist() == sample_tokens_reference(logits.double(), slots, index, given)[0].tolist()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's warning in the interpreter
@pytest.mark.parametrize("limits", [{}, {"temperature": 0.0}, {"top_p": 0.9}], ids=str)
def test_logits_that_are_not_numbers(limits: dict[str, float]) -> None:
    logits = torch.randn(4, 300)
    logits[0, 200] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3] = float("-inf")
    logits[3, 260] = -4.0  # the only one that is allowed
    slots = torch.arange(4)
    tokens, best = run(logits, slots, slots, params(**limits))
    assert best[:2].isnan().all()
    assert best[2] == float("-inf")
    assert best[3].isfinite()
    assert tokens.tolist() == [0, 0, 0, 260]


@pytest.mark.parametrize("limits", [{"top_p": 0.8}, {"top_k": 30, "top_p": 0.9}], ids=str)
def test_the_sampler_on_cpu_draws_the_same(limits: dict[str, float]) -> None:
    logits = torch.randn(3, 400) * 3
    given, slots, index = params(**limits), torch.arange(len(logits)), torch.arange(len(logits))
    top_k = given.top_k[:3].long().clamp(max=400)
    tokens = sample_limited(
        logits,
        SamplingLimits(top_k, given.top_p[:3], given.min_p[:3]),
        Noise(given.key[:, :3], index, given.choice[:3].long()),
    )[1]
    assert run(logits, slots, index, given)[0].tolist() == tokens.tolist()


def test_draws_follow_the_distribution() -> None:
    """Many draws with other indices: chi-square of 4 kept tokens."""
    logits = torch.tensor([[1.0, 0.5, -3.0, 0.2, 0.1, -6.0]])
    num = 2000
    slots, index = torch.zeros(num, dtype=torch.int64), torch.arange(num)
    given = params(top_k=4)
    drawn = sample_tokens_reference(logits.expand(num, -1).double(), slots, index, given)[0]
    counts = torch.bincount(drawn, minlength=6).double()
    shares = torch.where(logits[0] > 0, logits[0].exp(), 0.0).double()
    want = shares / shares.sum() * num
    kept = want > 0
    assert float(((counts - want)[kept] ** 2 / want[kept]).sum()) < 16.3  # 3 degrees, p = 0.001
    assert counts[~kept].sum() == 0


def test_what_does_not_fit_is_refused() -> None:
    logits, slots, index = torch.randn(2, 30), torch.arange(2), torch.arange(2)
    with pytest.raises(ValueError, match="tokens"):
        sample_tokens(logits, slots, index, params(), torch.zeros(3, dtype=torch.int64), torch.zeros(2))
    with pytest.raises(ValueError, match="slots"):
        sample_tokens(logits, slots.int(), index, params(), slots.clone(), torch.zeros(2))
    with pytest.raises(ValueError, match="logits"):
        sample_tokens(logits.long(), slots, index, params(), slots.clone(), torch.zeros(2))


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_row_is_split_as_it_is_alone(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "_PROGRAMS", 4)
    monkeypatch.setattr(file, "_WIDE_PROGRAMS", 4)
    splits: list[tuple[int, int]] = []
    split = file.split_tiles
    monkeypatch.setattr(file, "split_tiles", lambda *of: splits.append(split(*of)) or splits[-1])
    for num in (1, 3):
        logits, rows = torch.randn(num, 1000, device=DEVICE), torch.arange(num, device=DEVICE)
        given, best = to_device(params(top_p=0.9)), torch.zeros(num, device=DEVICE)
        sample_tokens(logits, rows, rows + 5, given, rows.clone(), best, batch_invariant=batch_invariant)
    alone, among = splits[:2], splits[2:]
    assert (alone == among) == batch_invariant


def test_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert run(torch.zeros(0, 10), none, none, params())[0].tolist() == []
