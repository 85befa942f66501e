"""Products of few rows with quantized weights in blocks, and what is fused with them, against float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compile_for_hopper import shared_bytes
from packed_experts import NF4, WEIGHT_ONLY, draw
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.quantized import linear_blocks_skinny as file
from blockyard.kernels.quantized.block_weights import BlockWeights, to_blocks
from blockyard.kernels.quantized.linear_blocks_skinny import linear_blocks_skinny, linear_blocks_skinny_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PDL = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
ERROR = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, nan_torch: object) -> None:
    """New tensors are found if they are not written."""
    monkeypatch.setattr(file, "torch", nan_torch)
    torch.manual_seed(1)


def blocks(form: str, outs: int, size: int, zero: int | None = None) -> BlockWeights:
    return to_blocks(draw(form, 1, outs, size, DEVICE, zero))


def product(x: Tensor, weights: BlockWeights, bias: Tensor | None = None, tile: int = 128, **fused: Any) -> Tensor:
    table = torch.tensor(NF4, device=DEVICE) if weights.table else None
    tiles = {"out_tile": 8, "tile": tile, "warps": 2, "early": 2}
    return linear_blocks_skinny(x, weights, bias, pdl=PDL, table=table, **tiles, **fused)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape and got.dtype == dtype and not got.isnan().any()
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-9))
    assert error <= ERROR[dtype], f"relative error {error}"


def rows_of(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, size, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", WEIGHT_ONLY)
def test_every_form(form: str, dtype: torch.dtype) -> None:
    """Incomplete tiles of rows and of outputs, and blocks behind the early ones."""
    weights, x = blocks(form, 11, 1024), rows_of(3, 1024, dtype)
    bias = rows_of(1, 11, dtype)[0]
    assert_close(product(x, weights, bias, 256), linear_blocks_skinny_reference(x, weights, bias), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["int4 g128", "mxfp4", "int8 rows"])
def test_what_is_fused(form: str, dtype: torch.dtype) -> None:
    weights, x, total = blocks(form, 11, 256), rows_of(2, 256, dtype), rows_of(2, 11, dtype)
    norm = RMSNorm(rows_of(1, 256, torch.float32)[0], 1e-6)
    want = linear_blocks_skinny_reference(x, weights, None, norm, add_to=total)
    got = product(x, weights, tile=128, norm=norm, add_to=total)
    assert got is total
    assert_close(got, want, dtype)
    x, total = rows_of(1, 512, dtype), rows_of(1, 11, dtype)
    want = linear_blocks_skinny_reference(x, weights, None, gated=True, add_to=total)
    assert_close(product(x, weights, tile=128, gated=True, add_to=total), want, dtype)


@pytest.mark.parametrize("zero", [0, 15, 16])
def test_extreme_zeros(zero: int) -> None:
    weights, x = blocks("int4 g64 uint8 zeros", 9, 256, zero), rows_of(1, 256, torch.float16)
    assert_close(product(x, weights), linear_blocks_skinny_reference(x, weights), torch.float16)


def test_scales_of_0_and_huge_ones() -> None:
    weights, x = blocks("int4 g128", 9, 256), rows_of(1, 256, torch.float16)
    assert weights.scales is not None
    weights.scales[0] = 0
    weights.scales[1] = 100
    assert_close(product(x, weights), linear_blocks_skinny_reference(x, weights), torch.float16)
    weights.scales[:] = 0
    assert not product(x, weights).any()


def test_a_row_does_not_depend_on_the_others() -> None:
    weights, x = blocks("nf4 g64", 9, 512), rows_of(4, 512, torch.float16)
    together = product(x, weights)
    assert torch.equal(product(x[3:], weights), together[3:])
    assert product(x[:0], weights).shape == (0, 9)


def test_what_does_not_fit_is_refused() -> None:
    weights, x = blocks("int4 g128", 8, 256), rows_of(9, 256, torch.float16)
    for some, fused in (
        (x, {}),
        (x[:1, :128], {}),
        (x[:1], {"gated": True}),
        (x[:1], {"tile": 64}),
        (x[:1], {"tile": 256}),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            product(some, weights, **fused)
    for bias in (x[0, :7], x[0, :8].float()):
        with pytest.raises(ValueError, match="does not fit"):
            product(x[:1], weights, bias)
    with pytest.raises(ValueError, match="normalised or gated"):
        product(rows_of(1, 512, torch.float16), weights, norm=RMSNorm(x[0], 1e-6), gated=True)


COMPILED = """
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.quantized.linear_blocks_skinny import linear_blocks_skinny
from blockyard.kernels.quantized.block_weights import to_blocks
from packed_experts import draw
torch.Tensor.is_cuda = True
tiles = {"out_tile": 8, "tile": 512, "warps": 4, "early": 2, "pdl": True}
norm = RMSNorm(torch.zeros(1024, dtype=torch.bfloat16), 1e-6)
for form in ("int4 g128", "int4 g64 uint8 zeros", "nf4 g64", "nvfp4", "int8 rows"):
    weights = to_blocks(draw(form, 1, 128, 1024, "cpu"))
    x = torch.zeros(2, 2048, dtype=torch.bfloat16)
    if form == "int4 g128":
        linear_blocks_skinny(x[:, :1024].contiguous(), weights, None, norm=norm, **tiles)
    linear_blocks_skinny(x[:1], weights, None, gated=True, add_to=x[:1, :128].contiguous(), **tiles)
"""


def test_kernels_compile_for_an_h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))
    assert len(shared_bytes(COMPILED, tmp_path)) == 6
