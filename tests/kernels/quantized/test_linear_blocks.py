"""Linear layers with quantized weights in blocks against float64: every form, odd sizes, poisoned outputs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compile_for_hopper import SHARED, shared_bytes
from packed_experts import NF4, WEIGHT_ONLY, draw
from torch import Tensor

from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace
from blockyard.kernels.quantized import linear_blocks as file
from blockyard.kernels.quantized.block_weights import (
    BLOCK,
    BlockWeights,
    can_be_blocks,
    dequantized_blocks,
    to_blocks,
)
from blockyard.kernels.quantized.linear_blocks import linear_blocks, linear_blocks_reference
from blockyard.kernels.quantized.packed_weights import dequantized
from blockyard.kernels.quantized.unpack_blocks import unpack_blocks, unpack_blocks_reference

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
    packed = draw(form, 1, outs, size, DEVICE, zero)
    made = to_blocks(packed)
    assert torch.equal(dequantized_blocks(made), dequantized(packed)[0])
    return made


def product(x: Tensor, weights: BlockWeights, bias: Tensor | None = None, split: int = 1, programs: int = 0) -> Tensor:
    tiling = Tiling(64, 16, BLOCK, 3, 4, PDL, 2 if PDL else 0)
    space = Workspace(40 * 64 * 16, 40, torch.device(DEVICE))
    table = torch.tensor(NF4, device=DEVICE) if weights.table else None
    got = linear_blocks(x, weights, bias, tiling, space, split, programs, table)
    assert not space.arrived.any(), "the next kernel would take parts that are not its own"
    return got


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == want.shape and got.dtype == dtype and not got.isnan().any()
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-9))
    assert error <= ERROR[dtype], f"relative error {error}"


def rows_of(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rows that are aligned, whatever their size is."""
    return torch.randn(rows, -(-size // 8) * 8, device=DEVICE).to(dtype)[:, :size]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", WEIGHT_ONLY)
def test_every_form(form: str, dtype: torch.dtype) -> None:
    """Two tiles of outputs and of rows, an incomplete block, and a tile that two programs share."""
    weights, x = blocks(form, 70, 203), rows_of(18, 203, dtype)
    bias = torch.randn(70, device=DEVICE).to(dtype)
    got = product(x, weights, bias, programs=3)
    assert_close(got, linear_blocks_reference(x, weights, bias), dtype)
    for begin, count in ((0, 70), (32, 37)):
        some = torch.full((count, 203), float("nan"), dtype=dtype, device=DEVICE)
        unpack_blocks(weights, some, begin, _table(weights))
        assert_close(some, unpack_blocks_reference(weights)[begin : begin + count], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [0, 15, 16])
def test_extreme_zeros(zero: int, dtype: torch.dtype) -> None:
    weights, x = blocks("int4 g64 uint8 zeros", 9, 256, zero), rows_of(3, 256, dtype)
    assert_close(product(x, weights), linear_blocks_reference(x, weights), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_0_and_huge_ones(dtype: torch.dtype) -> None:
    weights, x = blocks("int4 g128", 9, 256), rows_of(3, 256, dtype)
    assert weights.scales is not None
    weights.scales[0] = 0
    weights.scales[1] = 100
    assert_close(product(x, weights), linear_blocks_reference(x, weights), dtype)
    weights.scales[:] = 0
    assert not product(x, weights).any()


@pytest.mark.parametrize("form", ["int4 g128", "nf4 g64", "int8 rows"])
def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    weights, x = blocks(form, 70, 384), rows_of(20, 384, torch.float16)
    together = product(x, weights, split=3)
    for some in (slice(0, 1), slice(5, 6), slice(7, 20)):
        assert torch.equal(product(x[some], weights, split=3), together[some])
    assert product(x[:0], weights).shape == (0, 70)


def test_what_does_not_fit_is_refused() -> None:
    weights, x = blocks("int4 g128", 8, 256), rows_of(2, 256, torch.float16)
    with pytest.raises(ValueError, match="do not fit a weight"):
        product(x[:, :128], weights)
    with pytest.raises(ValueError, match="contiguous"):
        product(x.t().contiguous().t(), weights)
    assert [can_be_blocks(group) for group in (0, 16, 64, 128, 256, 48, 192, 8)] == [True] * 5 + [False] * 3
    assert replace(weights, group=256).is_4bit


COMPILED = """
from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace
from blockyard.kernels.quantized import linear_blocks as file
from blockyard.kernels.quantized.linear_blocks import linear_blocks
from blockyard.kernels.quantized.unpack_blocks import unpack_blocks
from blockyard.kernels.quantized.block_weights import to_blocks
from packed_experts import draw
import torch
torch.Tensor.is_cuda = True
for form in FORMS_TO_COMPILE:
    weights = to_blocks(draw(form, 1, 128, 512, "cpu"))
    for rows in (16, 64) if form == "int4 g128" else (64,):
        tiling = Tiling(128, rows, 128, 4, 4, True, 2)
        space = Workspace(1 << 16, 64, torch.device("cpu"))
        linear_blocks(torch.zeros(rows, 512, dtype=torch.bfloat16), weights, None, tiling, space, 2)
    unpack_blocks(weights, torch.zeros(128, 512, dtype=torch.bfloat16), 0, torch.zeros(16))
"""


def test_kernels_compile_for_an_h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))
    forms = ["int4 g128", "int4 g64 uint8 zeros", "nf4 g64", "nvfp4", "int8 rows"]
    found = shared_bytes(COMPILED.replace("FORMS_TO_COMPILE", repr(forms)), tmp_path)
    assert len(found) == 2 * len(forms) + 1 and max(size for _, size in found) <= SHARED


def _table(weights: BlockWeights) -> Tensor | None:
    return torch.tensor(NF4, device=DEVICE) if weights.table else None
