"""Products of rows that the kernel normalises and rounds itself: the bits of the kernels that it takes the place of."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockyard.kernels.layers.add_rms_norm import add_rms_norm_rounded
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.layers.rounding import E4M3, InputRounding
from blockyard.kernels.quantized.linear_w8a8_rounding import linear_w8a8_rounding, tile_of
from blockyard.kernels.quantized.linear_w8a8_skinny import linear_w8a8_skinny
from blockyard.kernels.quantized.operands import Weight8Bit
from blockyard.kernels.quantized.quantize_rows import quantize_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PDL = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
SCALE = torch.tensor(0.01, device=DEVICE)
ROUNDINGS = [
    (InputRounding(E4M3), 1),
    (InputRounding(E4M3, most=1.5), 1),
    (InputRounding(E4M3, scale=SCALE), 1),
    (InputRounding(E4M3, 128), 1),
    (InputRounding(E4M3, 128, scale=SCALE), 128),
    (InputRounding(E4M3, 128), 128),
    (InputRounding(torch.int8), 1),
    (InputRounding(torch.int8, 128), 1),
]


def assert_same(got: Tensor, want: Tensor) -> None:
    """On a GPU kernels sum in another order."""
    if DEVICE == "cpu":
        assert torch.equal(got, want)
    assert not got.isnan().any()
    assert float((got.double() - want.double()).norm()) <= 4e-3 * float(want.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rounding", "block"), ROUNDINGS, ids=str)
@pytest.mark.parametrize(("rows", "size", "outs"), [(1, 576, 33), (2, 208, 8), (0, 64, 4)])
def test_bits_of_separate_kernels(
    rows: int, size: int, outs: int, rounding: InputRounding, block: int, dtype: torch.dtype
) -> None:
    whole = torch.randint(-127, 128, (rows, size), device=DEVICE)  # their ratios often lie between two codes
    whole[:, :1] = 126
    made = quantize_rows(torch.randn(outs, size, device=DEVICE), InputRounding(rounding.dtype, rounding.group))
    weight = Weight8Bit(made.codes, made.scales[::block].contiguous(), rounding.group, block)
    bias, total = torch.randn(outs, device=DEVICE).to(dtype), torch.randn(rows, outs, device=DEVICE).to(dtype)
    norm = RMSNorm(torch.randn(size, device=DEVICE), 1e-5)
    tiles: dict[str, Any] = {"out_tile": 4, "warps": 4, "pdl": PDL}
    before = tiles | {"tile": tile_of(size, rounding.group)}
    for x in (whole.to(dtype) / 64, torch.randn(rows, size, device=DEVICE).to(dtype)):
        want = linear_w8a8_skinny(quantize_rows(x, rounding), weight, bias, **before)
        assert_same(linear_w8a8_rounding(x, rounding, weight, bias, **tiles), want)
        want = linear_w8a8_skinny(quantize_rows(x, rounding), weight, None, add_to=total.clone(), **before)
        given = total.clone()
        assert linear_w8a8_rounding(x, rounding, weight, None, add_to=given, **tiles) is given
        assert_same(given, want)
        want = linear_w8a8_skinny(
            add_rms_norm_rounded(x, None, norm.weight, norm.eps, rounding), weight, None, **before
        )
        assert_same(linear_w8a8_rounding(x, rounding, weight, None, norm=norm, **tiles), want)


def test_rows_of_zeros_and_with_nan() -> None:
    x = torch.zeros(2, 256, device=DEVICE).half()
    x[1, 3] = float("nan") if DEVICE == "cuda" else 0.0  # the interpreter has no e4m3 that is none
    weight = Weight8Bit(torch.ones(8, 256, device=DEVICE).to(E4M3), torch.ones(8, device=DEVICE))
    out = linear_w8a8_rounding(x, InputRounding(E4M3), weight, None, out_tile=4, warps=4, pdl=PDL)
    assert not out[0].any()
    assert out[1].isnan().all() == (DEVICE == "cuda")


def test_what_does_not_fit_is_refused() -> None:
    x, codes = torch.zeros(2, 256, device=DEVICE).half(), torch.zeros(8, 256, device=DEVICE).to(E4M3)
    weight, rounding = Weight8Bit(codes, torch.zeros(8, device=DEVICE)), InputRounding(E4M3)

    def call(x: Tensor, rounding: InputRounding = rounding, **others: Any) -> None:
        linear_w8a8_rounding(x, rounding, weight, None, out_tile=4, warps=4, pdl=False, **others)

    with pytest.raises(ValueError, match="over 2"):
        call(x.repeat(2, 1))
    with pytest.raises(ValueError, match="do not fit a weight"):
        call(x[:, :128].contiguous())
    for other in (InputRounding(torch.int8), InputRounding(E4M3, 128)):
        with pytest.raises(ValueError, match="does not fit the weight"):
            call(x, other)
    with pytest.raises(ValueError, match="contiguous"):
        call(x.T.contiguous().T)
    with pytest.raises(ValueError, match="norm's"):
        call(x, norm=RMSNorm(torch.zeros(8, device=DEVICE), 1e-5))
    with pytest.raises(ValueError, match="does not fit"):
        call(x, add_to=x)
