"""Rows in 8 bits: kernels that write them have the bits of the definition, and of a rounding after another kernel."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockyard.kernels.layers import round_row
from blockyard.kernels.layers.act_mul import act_mul, act_mul_rounded
from blockyard.kernels.layers.add_rms_norm import add_rms_norm, add_rms_norm_rounded
from blockyard.kernels.layers.rounding import E4M3, InputRounding, RoundedRows, round_rows_reference
from blockyard.kernels.quantized.quantize_rows import quantize_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
SCALE = torch.tensor(0.02, device=DEVICE)
ROUNDINGS = {
    "e4m3": InputRounding(E4M3),
    "e4m3 in groups": InputRounding(E4M3, 128),
    "e4m3 with a bound": InputRounding(E4M3, most=0.7),
    "static e4m3": InputRounding(E4M3, scale=SCALE),
    "static e4m3 in groups": InputRounding(E4M3, 128, scale=SCALE),
    "int8": InputRounding(torch.int8),
    "static int8": InputRounding(torch.int8, scale=SCALE),
}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills outputs with bytes of 0x7f, NaN in e4m3, so that unwritten elements are found."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full((*shape, dtype.itemsize), 0x7F, dtype=torch.uint8, device=device).view(dtype).squeeze(-1)

    monkeypatch.setattr(round_row, "torch", Torch())


def rows_of(num: int, size: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(num, size, device=DEVICE)
    if num > 3:
        x[1] = 0
        x[2] *= 1e4 if dtype == torch.float16 else 1e30
        x[3] *= 1e-6
    return x.to(dtype)


def assert_same(got: RoundedRows, want: RoundedRows) -> None:
    assert got.dtype == want.dtype
    assert got.codes.dtype == want.codes.dtype
    assert got.scales.shape == want.scales.shape
    assert torch.equal(got.scales, want.scales)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUNDINGS)
@pytest.mark.parametrize("size", [1, 130, 576, 10944])
def test_bits_are_those_of_the_definition(size: int, name: str, dtype: torch.dtype) -> None:
    x = rows_of(5, size, dtype)
    assert_same(quantize_rows(x, ROUNDINGS[name]), round_rows_reference(x, ROUNDINGS[name]))
    wide = torch.cat([x, x], 1)[:, :size]  # strided rows
    assert_same(quantize_rows(wide, ROUNDINGS[name]), round_rows_reference(x, ROUNDINGS[name]))


@pytest.mark.parametrize("rounding", [InputRounding(E4M3), InputRounding(E4M3, 128), InputRounding(torch.int8)])
def test_ties_and_edges(rounding: InputRounding) -> None:
    """Numbers halfway between codes, the largest ones and zeros of both signs."""
    halves = torch.arange(-127, 128) + 0.5
    most = 448.0 if rounding.dtype == E4M3 else 127.0
    x = torch.cat([torch.tensor([most, -0.0, 0.0]), halves.clamp(-most, most)])[None].to(DEVICE)
    assert_same(quantize_rows(x, rounding), round_rows_reference(x, rounding))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROUNDINGS)
def test_norms_and_gates_write_what_a_later_rounding_would(name: str, dtype: torch.dtype) -> None:
    """The same bits; in float32 on a GPU, two kernels with the same operations may differ in a last one."""
    check = assert_near if dtype == torch.float32 and DEVICE == "cuda" else assert_same
    rounding, size = ROUNDINGS[name], 576
    residual, delta, weight = (torch.randn(3, size, device=DEVICE).to(dtype) for _ in range(3))
    before = residual.clone()
    normed = add_rms_norm(residual, delta, weight[0], 1e-5)
    check(add_rms_norm_rounded(before, delta, weight[0], 1e-5, rounding), round_rows_reference(normed, rounding))
    assert torch.equal(before, residual)
    alone = add_rms_norm(residual, None, weight[0], 1e-5)
    check(add_rms_norm_rounded(residual, None, weight[0], 1e-5, rounding), round_rows_reference(alone, rounding))
    gate_up = torch.randn(3, 2 * size, device=DEVICE).to(dtype)
    for activation in ("silu", "gelu_tanh"):
        gated = round_rows_reference(act_mul(gate_up, activation), rounding)
        check(act_mul_rounded(gate_up, activation, rounding), gated)


def assert_near(got: RoundedRows, want: RoundedRows) -> None:
    torch.testing.assert_close(got.scales, want.scales, rtol=1e-6, atol=0.0)
    moved = (got.codes.float() != want.codes.float()).float().mean()
    assert float(moved) < 0.01, "more than a rounding here and there"


def test_no_rows() -> None:
    assert quantize_rows(torch.empty(0, 64, device=DEVICE), InputRounding(E4M3)).codes.shape == (0, 64)


def test_what_is_not_supported_is_refused() -> None:
    x = torch.randn(2, 64, device=DEVICE)
    with pytest.raises(ValueError, match="contiguous"):
        quantize_rows(x.T, InputRounding(E4M3))
    with pytest.raises(ValueError, match="powers of two"):
        quantize_rows(x, InputRounding(E4M3, 24))
    with pytest.raises(ValueError, match="e4m3 or int8"):
        quantize_rows(x, InputRounding(torch.int16))
