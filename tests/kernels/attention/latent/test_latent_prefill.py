"""The write of latent rows, products by head and prefill attention of latent layers, against references in float64."""

import pytest
import torch
from torch import Tensor

from blockyard.kernels.attention.latent import head_products as products
from blockyard.kernels.attention.latent import prefill_in_pieces as file
from blockyard.kernels.attention.latent.head_products import head_products, head_products_reference
from blockyard.kernels.attention.latent.latent_prefill import KeyPiece, PrefillState, latent_prefill
from blockyard.kernels.attention.latent.prefill_in_pieces import (
    gather_rows,
    gather_rows_reference,
    piece_tokens,
    prefill_in_pieces,
    prefill_in_pieces_reference,
)
from blockyard.kernels.attention.latent.write_latent import write_latent, write_latent_reference
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.kv_types import FP8_MAX
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # norm of the difference over the norm
ERROR |= dict.fromkeys(FP8_MAX, 0.3 if DEVICE == "cpu" else 0.02)  # the interpreter may lose the carry of a rounding
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
BLOCKS, SIZE = 90, 8


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))
    assert error <= ERROR[dtype], f"relative error {error}"


class Step:
    """Sequences of (tokens in the cache, new tokens), a negative first number for one without a slot, behind decodes.

    The cache has NaN where no sequence has a token.
    """

    def __init__(self, spans: list[tuple[int, int]], row_dim: int, dtype: torch.dtype, num_decodes: int = 0) -> None:
        torch.manual_seed(len(spans))
        self.longest = max([max(before, 0) for before, _ in spans], default=0)
        counts = torch.tensor([new for _, new in spans], dtype=torch.int64)
        width = max([(before + new) // SIZE + 1 for before, new in spans], default=1)
        tables = torch.randperm(BLOCKS)[: (len(spans) + 1) * width].view(-1, width).int()
        ids = torch.tensor([i if before >= 0 else -1 for i, (before, _) in enumerate(spans)], dtype=torch.int64)
        where = [torch.arange(max(before, 0), max(before, 0) + new) for before, new in spans]
        skipped = torch.zeros(num_decodes, dtype=torch.int64)
        slots, positions = torch.cat((skipped, ids.repeat_interleave(counts))), torch.cat((skipped, *where))
        self.seqs = PagedKVMetadata(slots.to(DEVICE), positions.to(DEVICE), tables.to(DEVICE))
        starts = torch.cat((counts.new_zeros(1), counts.cumsum(0))) + num_decodes
        self.starts, self.tokens = starts.int().to(DEVICE), len(slots)
        layer = torch.full((BLOCKS, 1, 1, SIZE, row_dim), float("nan"))
        for i, (before, _) in enumerate(spans):
            for at in range(before):
                layer[int(tables[i, at // SIZE]), 0, 0, at % SIZE] = torch.randn(row_dim)
        self.layer = layer.to(DEVICE, dtype)


@pytest.mark.parametrize("kv_dtype", [None, *FP8_MAX])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "latent", "rotated", "turns"), [(3, 24, 6, True), (20, 16, 8, True), (2, 8, 4, False)]
)
def test_write_latent(
    heads: int, latent: int, rotated: int, turns: bool, dtype: torch.dtype, kv_dtype: torch.dtype | None
) -> None:
    step = Step([(5, 1), (-1, 2), (9, 12)], latent + rotated, dtype)
    layer, scales = step.layer, None
    if kv_dtype is not None:
        layer, scales = step.layer.nan_to_num().to(kv_dtype), torch.full((2,), 0.05, device=DEVICE)
    query = torch.randn(step.tokens, heads + 1, 10 + rotated, device=DEVICE).to(dtype)[:, :heads]
    rows = torch.randn(step.tokens, latent + rotated + 3, device=DEVICE).to(dtype)[:, 3:]
    weight, angles = torch.randn(latent, device=DEVICE).to(dtype), torch.randn(step.tokens, 1, rotated // 2)
    rotation = torch.polar(torch.ones_like(angles), angles).to(DEVICE) if turns else None
    wanted = [query.clone(), rows.clone(), layer.clone()]
    write_latent_reference(*wanted, step.seqs, rotation, weight, 1e-6, scales)
    write_latent(query, rows, layer, step.seqs, rotation, weight, 1e-6, scales)
    for got, want in zip((query, rows), wanted, strict=False):
        assert_close(got, want, dtype)
    assert torch.equal(layer.isnan(), wanted[2].isnan())
    written = layer.float().nan_to_num(), wanted[2].float().nan_to_num()
    assert_close(*written, dtype if kv_dtype is None else kv_dtype)
    assert torch.equal(query[..., :10], wanted[0][..., :10])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 33, 70])
def test_head_products(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    up = torch.randn(3, 30, 80, device=DEVICE).to(dtype)
    query = torch.randn(rows, 3, 14 + 8, device=DEVICE).to(dtype)[..., :14]
    latent = torch.randn(rows, 3, 80, device=DEVICE).to(dtype)
    for x, weight in ((query, up[:, :14]), (latent, up[:, 14:].mT)):
        want = head_products_reference(x.double(), weight.double())
        got = head_products(x, weight)
        assert_close(got, want, dtype)
        invariant = head_products(x, weight, batch_invariant=True)
        assert_close(invariant, want, dtype)
        for row in range(0, rows, 20):
            assert torch.equal(head_products(x[row : row + 1], weight, batch_invariant=True)[0], invariant[row])


def test_head_products_loads_some_weights_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_FEW_INNER", 16)
    monkeypatch.setattr(products, "_EARLY", 2)
    x, weight = torch.randn(5, 3, 70, device=DEVICE), torch.randn(3, 70, 30, device=DEVICE)
    assert_close(head_products(x, weight), head_products_reference(x.double(), weight.double()), torch.float32)


CASES = {  # (tokens in the cache, new tokens) of each sequence, rows of decodes before them
    "one": ([(0, 9)], 0),
    "several tiles": ([(0, 150), (0, 70)], 3),
    "cached": ([(130, 9), (0, 5), (7, 30)], 2),
    "padding": ([(20, 3), (-1, 4)], 0),
    "a sequence without tokens": ([(9, 4), (0, 0)], 0),
    "nothing": ([], 0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_prefill_in_pieces(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 tokens; the bound of contexts is larger than they are."""
    heads, plain, rotated, value, latent = 3, 10, 6, 14, 24
    monkeypatch.setattr(file, "_PIECE_BYTES", 1)
    spans, num_decodes = CASES[case]
    step = Step(spans, latent + rotated, dtype, num_decodes)
    query = torch.randn(step.tokens, heads + 1, plain + rotated, device=DEVICE).to(dtype)[:, :heads]
    rows = torch.randn(step.tokens, latent + rotated, device=DEVICE).to(dtype)[num_decodes:]
    up = (torch.randn(heads, plain + value, latent, device=DEVICE) * latent**-0.5).to(dtype)
    want = prefill_in_pieces_reference(
        query.double(), rows.double(), step.layer.double(), step.seqs, step.starts, ScoreRules(scale=0.4), up.double()
    )
    for bound in (step.longest, 200):
        out = torch.full((len(rows), heads * value), float("nan"), dtype=dtype, device=DEVICE)
        prefill_in_pieces(query, rows, step.layer, step.seqs, step.starts, ScoreRules(scale=0.4), up, bound, out)
        assert_close(out, want, dtype)


def test_a_sequence_that_is_not_finite_spoils_no_other() -> None:
    """It has no slot: the interpreter refuses to compute with what is not finite."""
    step = Step([(3, 9), (-1, 5)], 14, torch.float32)
    query, rows = torch.randn(14, 2, 10, device=DEVICE), torch.randn(14, 14, device=DEVICE)
    up = torch.randn(2, 11, 10, device=DEVICE)
    rows[9:] = float("nan")
    out = torch.empty(14, 2 * 5, device=DEVICE)
    prefill_in_pieces(query, rows, step.layer, step.seqs, step.starts, ScoreRules(scale=0.4), up, 3, out)
    assert out[:9].isfinite().all() and not out[9:].any()


@pytest.mark.parametrize("kv_dtype", [torch.float16, *FP8_MAX])
def test_gather_rows(kv_dtype: torch.dtype) -> None:
    step = Step([(40, 2), (-1, 3), (9, 1), (0, 4)], 30, torch.float32)
    layer, piece = step.layer.nan_to_num().to(kv_dtype), KeyPiece(5, 20)
    scales = torch.full((2,), 0.5, device=DEVICE) if kv_dtype in FP8_MAX else None
    want = gather_rows_reference(layer, step.seqs, step.starts, piece, torch.float32) * (
        0.5 if scales is not None else 1
    )
    assert torch.equal(gather_rows(layer, step.seqs, step.starts, piece, torch.float32, scales), want)


def test_pieces_take_bounded_memory() -> None:
    assert piece_tokens(1, 16 * 256 * 2, 100_000) == (128 << 20) // (16 * 256 * 2)
    assert piece_tokens(4, 128 * 256 * 2, 100_000) == 512
    assert piece_tokens(1, 16 * 256 * 2, 100) == 128
    assert piece_tokens(10_000, 128 * 256 * 2, 100) == 64


def test_inputs_that_do_not_fit() -> None:
    step, query, rows = Step([(0, 3)], 14, torch.float32), torch.zeros(3, 2, 10), torch.zeros(3, 14)
    query, rows, out = query.to(DEVICE), rows.to(DEVICE), torch.zeros(3, 10, device=DEVICE)
    rules = ScoreRules(scale=1.0)
    kv, weight = torch.zeros(3, 2, 11, device=DEVICE), torch.ones(10, device=DEVICE)
    with pytest.raises(ValueError, match="are too few"):
        latent_prefill(query, kv[:2], rows[:2, 10:], step.seqs, step.starts, rules, out)
    with pytest.raises(ValueError, match="the state has another shape"):
        state = PrefillState.make(2, 2, 5, out.device)
        latent_prefill(query, kv, rows[:, 10:], step.seqs, step.starts, rules, out, KeyPiece(0, 3), state)
    with pytest.raises(ValueError, match="does not fit query"):
        prefill_in_pieces(query, rows, step.layer, step.seqs, step.starts, rules, kv.new_zeros(2, 6, 10), 0, out)
    with pytest.raises(ValueError, match="do not fit a layer"):
        write_latent(query, rows, step.layer[..., 1:], step.seqs, None, weight, 1e-6)
    with pytest.raises(ValueError, match="rotation"):
        write_latent(query, rows, step.layer, step.seqs, torch.zeros(3, 1, 3, dtype=torch.complex64), weight, 1e-6)
    with pytest.raises(ValueError, match="does not fit"):
        head_products(query, weight.new_zeros(2, 9, 4))
