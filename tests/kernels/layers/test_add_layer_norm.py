"""Residual addition with LayerNorm against its reference in float64, and compiled for an H100."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_for_hopper import shared_bytes
from torch import Tensor

from blockyard.kernels.layers import add_layer_norm as file
from blockyard.kernels.layers.add_layer_norm import add_layer_norm, add_layer_norm_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # norm of the difference over the norm
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
SIZES = [(1, 64), (3, 100), (5, 257), (4, 768), (0, 8), (2, 1)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, nan_torch: Any) -> None:
    monkeypatch.setattr(file, "torch", nan_torch)


def rows_of(rows: int, size: int, dtype: torch.dtype, gap: int) -> Tensor:
    """Strided rows, whose mean is not 0."""
    return (torch.randn(rows, size + gap, device=DEVICE) + 2).to(dtype)[:, :size]


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.is_contiguous() and not got.isnan().any()
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))
    assert error <= ERROR[got.dtype], f"relative error {error}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SIZES)
@pytest.mark.parametrize("affine", ["weight and bias", "weight", ""])
def test_sum_and_norm(rows: int, size: int, affine: str, dtype: torch.dtype) -> None:
    weight = torch.randn(size, device=DEVICE).to(dtype) if affine else None
    bias = torch.randn(size, device=DEVICE).to(dtype) if "bias" in affine else None
    scale, shift = (None if one is None else one.double() for one in (weight, bias))
    for keeps_sum in (True, False):
        residual, delta = rows_of(rows, size, dtype, gap=3), rows_of(rows, size, dtype, gap=5)
        before, total = residual.clone(), residual + delta
        exact = total.double() if keeps_sum else residual.double() + delta.double()
        by_reference = add_layer_norm_reference(residual.clone(), delta, weight, bias, 1e-5, keeps_sum)
        out = add_layer_norm(residual, delta, weight, bias, 1e-5, keeps_sum)
        assert torch.equal(residual, total if keeps_sum else before)
        want = F.layer_norm(exact, (size,), scale, shift, 1e-5)
        assert_close(out, want)
        assert_close(by_reference, want)


def test_rows_far_from_zero() -> None:
    """A variance by the mean of squares would be lost."""
    residual, delta = torch.randn(3, 96, device=DEVICE), torch.full((3, 96), 1e4, device=DEVICE)
    want = F.layer_norm((residual + delta).double(), (96,), None, None, 1e-5)
    out = add_layer_norm(residual, delta, None, None, 1e-5)
    assert float((out.double() - want).abs().max()) < 5e-3


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(2, 8, device=DEVICE)
    for delta, weight, bias in ((x[:1], None, None), (x, x[0, :4], None), (x, x[0], x)):
        with pytest.raises(ValueError, match="do not fit"):
            add_layer_norm(x, delta, weight, bias, 1e-5)
    for delta, weight, bias in ((x.half(), None, None), (x, x[0].half(), None), (x, x[0], x[0].half())):
        with pytest.raises(ValueError, match="dtypes differ"):
            add_layer_norm(x, delta, weight, bias, 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        add_layer_norm(x.t(), x.t(), None, None, 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        add_layer_norm(x, x, torch.zeros(16, device=DEVICE)[::2], None, 1e-5)
    wide = torch.zeros(1, file.LONGEST_ROW + 1, device=DEVICE)
    with pytest.raises(ValueError, match="longer than"):
        add_layer_norm(wide, wide, None, None, 1e-5)


LAUNCHES = """
from blockyard.kernels.layers import add_layer_norm as file

file.supports_pdl = lambda device: True
for size in (384, 768, 1024, 4096):
    x, vector = torch.zeros(64, size).bfloat16(), torch.ones(size).bfloat16()
    for weight, bias in ((vector, vector), (vector, None), (None, None)):
        for keeps_sum in (True, False):
            file.add_layer_norm(x, x, weight, bias, 1e-12, keeps_sum)
"""


def test_sizes_of_encoders_compile_for_an_h100(tmp_path: Path) -> None:
    assert {name for name, _ in shared_bytes(LAUNCHES, tmp_path)} == {"add_layer_norm_kernel"}
