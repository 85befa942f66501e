"""RMSNorm and RoPE against their textbook forms."""

import pytest
import torch
import torch.nn.functional as F

from blockyard.kernels.layers.apply_rope import apply_rope_reference, interleave_pairs
from blockyard.kernels.layers.rms_norm import RMSNorm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e4, 0.0])
@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_rms_norm(dtype: torch.dtype, scale: float, size: int) -> None:
    x = (torch.randn(5, size) * scale).to(dtype)
    norm = RMSNorm(torch.randn(size).to(dtype), 1e-6)
    norm.prepare()
    before = x.clone()
    expected = F.rms_norm(x.double(), (size,), norm.weight.double(), 1e-6)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(norm(x).double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_a_weight_for_each_head(dtype: torch.dtype) -> None:
    x = torch.randn(5, 9, 16).to(dtype)
    norm = RMSNorm(torch.randn(6, 16).to(dtype), 1e-5)
    norm.prepare()
    part = x[:, :6]  # a view with gaps, as q and k are
    expected = F.rms_norm(part.double(), (16,), None, 1e-5) * norm.weight.double()
    tolerance = 1e-6 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(norm(part).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_on_pairs_is_rope_on_halves(dtype: torch.dtype) -> None:
    tokens, heads, dim = 11, 3, 16
    x = torch.randn(tokens, heads, dim).to(dtype)
    angles = torch.arange(tokens).float()[:, None] * 0.3 ** torch.arange(dim // 2).float()
    low, high = x.float().chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    halves = torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def pairs(y: torch.Tensor) -> torch.Tensor:
        """Heads with rows in the order in which the loader arranges them."""
        return torch.stack([interleave_pairs(row.reshape(-1), dim).view(heads, dim) for row in y])

    wide = torch.zeros(tokens, heads + 2, dim, dtype=dtype)
    wide[:, :heads] = pairs(x)
    apply_rope_reference(wide[:, :heads], torch.polar(torch.ones_like(angles), angles)[:, None])
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(wide[:, :heads].float(), pairs(halves), rtol=tolerance, atol=tolerance)
    assert not wide[:, heads:].any()
