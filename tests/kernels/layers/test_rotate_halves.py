"""The rotation of halves against its reference and transformers' own, and compiled for an H100."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compile_for_hopper import shared_bytes
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from blockyard.kernels.layers import rotate_halves as file
from blockyard.kernels.layers.rotate_halves import rotate_halves, rotate_halves_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def joint(tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A joint product with numbers of others around, and q and k in it."""
    wide = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim + 6, device=DEVICE).to(dtype)
    ends = (3 + heads * head_dim, 3 + (heads + kv_heads) * head_dim)
    q = wide[:, 3 : ends[0]].view(1, tokens, heads, head_dim)
    k = wide[:, ends[0] : ends[1]].view(1, tokens, kv_heads, head_dim)
    return wide, q.transpose(1, 2), k.transpose(1, 2)


def angles(tokens: int, rotary_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tuple(torch.randn(2, 1, tokens, rotary_dim, device=DEVICE).to(dtype))  # type: ignore[return-value]


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and not got.isnan().any()
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-12))
    assert error <= ERROR[dtype], f"relative error {error}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [(1, 4, 2, 16, 16), (3, 5, 1, 24, 24), (5, 4, 4, 20, 6), (0, 4, 2, 16, 16), (2, 1, 1, 2, 2), (5, 6, 3, 8, 4)],
)
@pytest.mark.parametrize(("in_place", "few"), [(True, 0), (True, 1000), (False, 0)])
def test_rotation(
    tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, in_place: bool, few: int,
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(file, "_FEW", few)
    wide, q, k = joint(tokens, heads, kv_heads, head_dim, dtype)
    cos, sin = angles(tokens, rotary_dim, dtype)
    before = wide.clone()
    want = rotate_halves_reference(*(x.double() for x in (q, k, cos, sin)))
    got = rotate_halves(q, k, cos, sin, in_place)
    for one, expected in zip(got, want, strict=True):
        assert one.shape == expected.shape
        assert_close(one, expected, dtype)
    if not in_place:
        assert torch.equal(wide, before)
        return
    assert got[0] is q and got[1] is k
    end = 3 + (heads + kv_heads) * head_dim
    assert torch.equal(wide[:, :3], before[:, :3]) and torch.equal(wide[:, end:], before[:, end:])


def test_the_reference_is_transformers_rotation() -> None:
    _, q, k = joint(4, 3, 2, 16, torch.float32)
    cos, sin = angles(4, 16, torch.float32)
    for got, want in zip(rotate_halves_reference(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(2, 4, 3, 8)}, "heads, tokens"),
        ({"k": torch.zeros(1, 4, 2, 8)}, "heads, tokens"),
        ({"cos": torch.zeros(1, 3, 6)}, "do not fit"),
        ({"cos": torch.zeros(1, 2, 8), "sin": torch.zeros(1, 2, 8)}, "do not fit"),
        ({"cos": torch.zeros(1, 3, 10), "sin": torch.zeros(1, 3, 10)}, "do not fit"),
        ({"cos": torch.zeros(1, 3, 7), "sin": torch.zeros(1, 3, 7)}, "do not fit"),
        ({"sin": torch.zeros(1, 3, 8, dtype=torch.float64)}, "dtypes differ"),
        ({"q": torch.zeros(1, 4, 8, 3).transpose(2, 3)}, "contiguous"),
    ],
)
def test_wrong_arguments(changed: dict[str, Any], message: str) -> None:
    given = {"q": torch.zeros(1, 4, 3, 8), "k": torch.zeros(1, 2, 3, 8)}
    given |= {"cos": torch.zeros(1, 3, 8), "sin": torch.zeros(1, 3, 8)} | changed
    with pytest.raises(ValueError, match=message):
        rotate_halves(**given, in_place=True)


LAUNCHES = """
from blockyard.kernels.layers import rotate_halves as file

file.supports_pdl = lambda device: True
for tokens in (1, 64, 4096):
    wide = torch.zeros(tokens, 6144).bfloat16()
    q, k = (x.view(1, tokens, -1, 128).transpose(1, 2) for x in (wide[:, :4096], wide[:, 4096:5120]))
    cos = torch.zeros(1, tokens, 128).bfloat16()
    file.rotate_halves(q, k, cos, cos, True)
    file.rotate_halves(q, k, cos[..., :64], cos[..., :64], False)
"""


def test_sizes_of_llama_compile_for_an_h100(tmp_path: Path) -> None:
    names = {name for name, _ in shared_bytes(LAUNCHES, tmp_path)}
    assert names == {"rotate_halves_kernel"}
