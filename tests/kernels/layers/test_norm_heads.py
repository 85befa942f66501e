"""The norm of heads against its reference, and compiled for an H100."""

from pathlib import Path

import pytest
import torch
from compile_for_hopper import shared_bytes

from blockyard.kernels.layers.norm_heads import norm_heads, norm_heads_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 4, 16), (3, 9, 24), (5, 1, 20), (0, 4, 16), (2, 3, 1)])
def test_norm_of_heads(rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
    wide = torch.randn(rows, heads + 2, head_dim + 1, device=DEVICE).to(dtype)
    for x in (wide[:, 1:-1, :head_dim], wide.transpose(0, 1)[1:-1, :, :head_dim].contiguous().transpose(0, 1)):
        for weight in (torch.randn(head_dim, device=DEVICE).to(dtype), torch.randn(head_dim, device=DEVICE)):
            before, want = x.clone(), norm_heads_reference(x.double(), weight.double(), 1e-5)
            out = norm_heads(x, weight, 1e-5)
            assert out.dtype == dtype and out.shape == want.shape and out.is_contiguous() and torch.equal(x, before)
            error = float((out.double() - want).norm() / want.norm().clamp_min(1e-12))
            assert error <= ERROR[dtype], f"relative error {error}"


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(2, 3, 8, device=DEVICE)
    for weight in (x[0, 0, :4], x[0, 0].half(), x[0]):
        with pytest.raises(ValueError, match="does not fit"):
            norm_heads(x, weight, 1e-5)
    with pytest.raises(ValueError, match="contiguous"):
        norm_heads(x.transpose(1, 2), x[0, :, 0].clone(), 1e-5)


LAUNCHES = """
from blockyard.kernels.layers import norm_heads as file

file.supports_pdl = lambda device: True
for tokens in (1, 64, 4096):
    for weight in (torch.ones(128), torch.ones(128).bfloat16()):
        file.norm_heads(torch.zeros(tokens, 48, 128).bfloat16()[:, :32], weight, 1e-6)
"""


def test_sizes_of_qwen3_compile_for_an_h100(tmp_path: Path) -> None:
    assert {name for name, _ in shared_bytes(LAUNCHES, tmp_path)} == {"norm_heads_kernel"}
