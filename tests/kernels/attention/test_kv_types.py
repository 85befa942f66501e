"""8-bit KV: written, and read by decodes and prefills, compared with float64 on the stored values."""

import pytest
import torch

from blockyard.kernels.attention.paged_decode import paged_decode, paged_decode_reference
from blockyard.kernels.attention.paged_prefill import paged_prefill, paged_prefill_reference
from blockyard.kernels.attention.score_rules import ScoreRules
from blockyard.kernels.kv_cache.kv_types import FP8_MAX
from blockyard.kernels.kv_cache.paged_kv import PagedKVMetadata
from blockyard.kernels.kv_cache.rope_write_kv import rope_write_kv, rope_write_kv_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the difference over the norm
SCALES = torch.tensor([0.02, 0.5], device=DEVICE)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("kv_dtype", FP8_MAX)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_8_bits(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Three rows of one sequence and the last of another: as a prefill and, the last rows, as decodes."""
    torch.manual_seed(1)
    tables = torch.randperm(12).view(2, 6).int().to(DEVICE)
    slots, positions = torch.tensor([1, 1, 1, 0]), torch.tensor([67, 68, 69, 20])
    seqs = PagedKVMetadata(slots.to(DEVICE), positions.to(DEVICE), tables)
    starts = torch.tensor([0, 3, 4], dtype=torch.int32, device=DEVICE)
    layer = (torch.randn(12, 2, 1, 16, 24, device=DEVICE) * 3).to(kv_dtype)
    q = torch.randn(4, 3, 24, device=DEVICE).to(dtype)
    rules = ScoreRules(scale=5.0, kv_scales=SCALES)
    want = paged_prefill_reference(q.double(), layer, seqs, starts, rules)
    out = torch.full((4, 72), float("nan"), dtype=dtype, device=DEVICE)
    paged_prefill(q, layer, seqs, starts, rules, 100, out)
    assert error(out, want) <= ERROR[dtype]
    last = PagedKVMetadata(seqs.slots[2:], seqs.positions[2:], tables)
    got = paged_decode(q[2:], layer, last, rules, 100)
    assert error(got, paged_decode_reference(q[2:].double(), layer, last, rules)) <= ERROR[dtype]


@pytest.mark.parametrize("kv_dtype", FP8_MAX)
@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bit_writes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Values that are too large become the largest value. Without a GPU only exact 8-bit values are tested: the
    interpreter rounds 1.99 to 1."""
    torch.manual_seed(2)
    seqs = PagedKVMetadata(
        torch.tensor([0, -1, 1], device=DEVICE),
        torch.tensor([3, 4, 9], device=DEVICE),
        torch.tensor([[1, 0], [2, 3]], dtype=torch.int32, device=DEVICE),
    )
    scales = torch.tensor([0.25, 0.5], device=DEVICE)
    qkv = torch.randn(3, 4, 16, device=DEVICE)
    if DEVICE == "cpu":
        qkv = qkv.to(kv_dtype).float()
    qkv = qkv.to(dtype)
    reachable = dtype != torch.float16 or kv_dtype == torch.float8_e4m3fn
    if reachable:
        qkv[0, 3, 5] = FP8_MAX[kv_dtype] * 0.75
    layer = torch.zeros(4, 2, 1, 8, 16, device=DEVICE).to(kv_dtype)
    want = layer.clone()
    rope_write_kv_reference(qkv.double(), want, seqs, None, None, 0.0, scales)
    rope_write_kv(qkv, layer, seqs, None, None, 0.0, scales)
    assert torch.equal(layer.float(), want.float())
    assert torch.equal(layer.float().count_nonzero((1, 2, 3, 4)).sign().cpu(), torch.tensor([0, 1, 0, 1]))
    assert not reachable or float(layer.float().max()) == FP8_MAX[kv_dtype]


def test_types_that_do_not_fit() -> None:
    seqs = PagedKVMetadata(
        torch.tensor([0], device=DEVICE),
        torch.tensor([3], device=DEVICE),
        torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
    )
    q, layer = torch.zeros(1, 1, 16, device=DEVICE), torch.zeros(1, 2, 1, 16, 16, device=DEVICE)
    with pytest.raises(ValueError, match="needs scales"):
        paged_decode(q, layer.to(torch.float8_e5m2), seqs, ScoreRules(scale=1.0), 16)
    with pytest.raises(ValueError, match="no scales"):
        paged_decode(q, layer, seqs, ScoreRules(scale=1.0, kv_scales=SCALES), 16)
