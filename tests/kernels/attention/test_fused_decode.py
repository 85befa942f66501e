"""Fused decode attention against its reference in float64; unwritten outputs are NaN."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockyard.kernels.attention import fused_decode as file
from blockyard.kernels.attention.fused_decode import (
    FusedDecodeConfig,
    SplitSemaphores,
    fused_decode,
    fused_decode_reference,
)
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.kv_types import FP8_MAX
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.layers.rms_norm import RMSNorm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the difference over the norm
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
BLOCKS = 120


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills new tensors with NaN, so that unwritten elements are found."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        return torch.full(args[0] if isinstance(args[0], tuple) else args, float("nan"), **kwargs)

    monkeypatch.setattr(file, "torch", Torch())


def use_small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "choose_config", lambda head_dim: FusedDecodeConfig(32, 2, 2, 2, ahead=head_dim < 100))


class Case:
    """Lengths count the new token; 0 is a row that pads. The pool is NaN wherever no older token lies."""

    def __init__(self, lengths: list[int], heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
        num, width = len(lengths), -(-max(lengths) // block_size)
        order = torch.randperm(num + 2)[:num]
        tables = torch.full((num + 2, width), 2**30, dtype=torch.int32)  # must not be read
        blocks = torch.randperm(BLOCKS)[: num * width].view(num, width)
        self.layer = torch.full((BLOCKS, 2, kv_heads, block_size, head_dim), float("nan"))
        for row, length in enumerate(lengths):
            used = -(-length // block_size)
            tables[order[row], :used] = blocks[row, :used].int()
            for i in range(length - 1):
                self.layer[blocks[row, i // block_size], :, :, i % block_size] = torch.randn(2, kv_heads, head_dim)
        slots = torch.tensor([int(order[r]) if n else -1 for r, n in enumerate(lengths)])
        positions = torch.tensor([max(n - 1, 0) for n in lengths])
        self.seqs = PagedKVMetadata(slots.to(DEVICE), positions.to(DEVICE), tables.to(DEVICE))
        angles = torch.randn(num, 1, head_dim // 2, device=DEVICE)
        self.rotation = torch.polar(torch.ones_like(angles), angles)
        self.norm_weight = torch.randn(heads + kv_heads, head_dim, device=DEVICE)
        self.values_weight = torch.randn(kv_heads, head_dim, device=DEVICE)
        wide = torch.randn(num, (heads + 2 * kv_heads) * head_dim + 8, device=DEVICE)  # rows with gaps
        self.qkv = wide[:, :-8].unflatten(1, (heads + 2 * kv_heads, head_dim))

    def check(
        self,
        dtype: torch.dtype,
        plain: bool,
        window: int | None,
        soft_cap: float | None,
        *,
        with_values: bool = False,
        chunked: bool = False,
        has_sinks: bool = False,
        spare: int = 0,
    ) -> None:
        """spare: tokens by which sequences may be longer as far as the host knows, so that programs have no keys."""
        wide = torch.zeros(len(self.qkv), self.qkv[0].numel() + 8, dtype=dtype, device=DEVICE)
        qkv = wide[:, :-8].view_as(self.qkv).copy_(self.qkv)
        layer, before = self.layer.to(DEVICE, dtype), qkv.clone()
        rotation = None if plain else self.rotation
        weight_dtype = torch.float32 if window else dtype  # also that of a norm with a unit offset
        weight = torch.cat((self.norm_weight, self.values_weight)) if with_values else self.norm_weight
        norm = None if plain else RMSNorm(weight.to(weight_dtype), 1e-6)
        want_layer = layer.double()
        sinks = torch.linspace(-3, 3, qkv.shape[1] - 2 * layer.shape[2], device=DEVICE) if has_sinks else None
        rules = ScoreRules(scale=0.2, window=window, soft_cap=soft_cap, chunked=chunked, sinks=sinks)
        want = fused_decode_reference(qkv.double(), want_layer, self.seqs, rotation, norm, rules)
        semaphores, max_seq_len = SplitSemaphores(64, torch.device(DEVICE)), int(self.seqs.positions.max()) + 1 + spare
        for _ in range(2):  # the counters that the first call leaves serve the second
            got = fused_decode(qkv, layer, self.seqs, rotation, norm, rules, max_seq_len, semaphores)
            assert_close(got, want, dtype)
            assert_close(layer.nan_to_num(0.5), want_layer.nan_to_num(0.5), dtype)
            assert not semaphores.counts.any()
        assert torch.equal(qkv, before)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert not got.isnan().any()
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-12))
    assert error <= ERROR[dtype], f"relative error {error}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "head_dim", "block_size", "window", "soft_cap", "plain"),
    [
        ([1, 65, 0, 17], 2, 1, 16, 8, None, None, False),
        ([90], 3, 1, 24, 16, None, None, False),  # three splits, two of which are combined at a time
        ([90], 2, 1, 24, 16, None, None, True),
        ([90], 2, 1, 24, 16, None, 0.5, True),
        ([70, 20], 2, 2, 16, 8, 20, None, False),
        ([0, 0, 0], 2, 1, 16, 8, None, None, True),
        ([70], 2, 1, 32, 5, 50, None, False),
        ([70], 2, 1, 32, 5, 50, 0.7, False),
        ([20, 13], 2, 1, 200, 16, None, None, False),  # shorter tiles
        ([20, 130], 2, 1, 512, 16, None, None, False),
        ([50], 2, 1, 320, 16, 20, None, True),
    ],
)
def test_fused_decode(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    soft_cap: float | None,
    plain: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_small_splits(monkeypatch)
    monkeypatch.setattr(file, "_COMBINED_ELEMENTS", 64)
    case = Case([max(n, 1) for n in lengths] if not any(lengths) else lengths, heads, kv_heads, head_dim, block_size)
    if not any(lengths):
        case.seqs.slots.fill_(-1)
    case.check(dtype, plain, window, soft_cap)


@pytest.mark.parametrize(("heads", "head_dim"), [(8, 64), (8, 128), (4, 256), (2, 512)])
@pytest.mark.parametrize("window", [None, 50])
def test_configs_of_head_sizes(heads: int, head_dim: int, window: int | None) -> None:
    """All query heads share one K/V head, and most programs of a short sequence have no keys."""
    num = 2 * file.choose_config(head_dim).min_keys + 5
    Case([num, 7], heads, 1, head_dim, 16).check(torch.float16, False, window, None, spare=200)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_sinks(window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several splits and in one."""
    use_small_splits(monkeypatch)
    Case([90], 6, 2, 16, 8).check(dtype, True, window, None, has_sinks=True)
    Case([20, 1, 0], 4, 2, 16, 8).check(dtype, False, window, None, has_sinks=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_normalised(dtype: torch.dtype) -> None:
    Case([20, 1, 70], 4, 2, 16, 8).check(dtype, False, None, None, with_values=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk", [20, 64, 100])
def test_rows_attend_within_their_chunk(chunk: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_splits(monkeypatch)
    Case([64, 65, 0, 90], 2, 1, 16, 8).check(dtype, False, chunk, None, chunked=True)


@pytest.mark.parametrize("kv_dtype", FP8_MAX)
def test_a_pool_of_8_bits(kv_dtype: torch.dtype) -> None:
    """Numbers that 8 bits can hold, as the interpreter rounds others its own way."""
    case, scales = Case([70, 9], 4, 2, 16, 8), torch.tensor([0.25, 0.5], device=DEVICE)
    layer = case.layer.nan_to_num(0.0).to(DEVICE).to(kv_dtype)
    qkv = case.qkv.to(kv_dtype).float() * torch.tensor([1, 1, 1, 1, 0.25, 0.25, 0.5, 0.5], device=DEVICE)[:, None]
    stored, rules = layer.clone(), ScoreRules(scale=0.2, kv_scales=scales)
    want = fused_decode_reference(qkv.double(), stored, case.seqs, None, None, rules)
    got = fused_decode(qkv, layer, case.seqs, None, None, rules, 70, SplitSemaphores(8, torch.device(DEVICE)))
    assert_close(got, want, torch.float32)
    assert torch.equal(layer.float(), stored.float())


def test_what_does_not_fit_is_refused() -> None:
    case = Case([3, 4], 4, 2, 16, 8)
    layer, semaphores = case.layer.to(DEVICE), SplitSemaphores(8, torch.device(DEVICE))
    rules = ScoreRules(scale=1.0)
    with pytest.raises(ValueError, match="7 counts for 2 rows of 4 heads"):
        fused_decode(case.qkv, layer, case.seqs, None, None, rules, 8, SplitSemaphores(7, torch.device(DEVICE)))
    with pytest.raises(ValueError, match="rotation"):
        fused_decode(case.qkv, layer, case.seqs, case.rotation[:1], None, rules, 8, semaphores)
    with pytest.raises(ValueError, match="pool's dtype"):
        fused_decode(case.qkv.half(), layer, case.seqs, None, None, rules, 8, semaphores)
