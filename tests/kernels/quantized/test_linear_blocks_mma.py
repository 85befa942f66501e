"""Products of up to 16 rows whose codes of 4 bits stay in registers, against float64: on a GPU, Gluon has no
interpreter."""

from pathlib import Path

import pytest
import torch
from compile_for_hopper import shared_bytes
from packed_experts import FORMS, draw
from torch import Tensor

from blockyard.kernels.quantized import linear_blocks_mma as file
from blockyard.kernels.quantized.block_weights import BlockWeights, to_blocks
from blockyard.kernels.quantized.linear_blocks import linear_blocks_reference
from blockyard.kernels.quantized.linear_blocks_mma import linear_blocks_mma
from blockyard.kernels.quantized.packed_weights import Codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
ERROR = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
FOUR_BITS = [name for name in FORMS if FORMS[name][0] in (Codes.INT4, Codes.E2M1, Codes.TABLE4) and name != "int4 g48"]
TILES = [(16, 8, 2), (32, 4, 1), (16, 16, 1), (64, 4, 2)]  # outputs, warps, steps ahead


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, nan_torch: object) -> None:
    """New tensors are found if they are not written."""
    monkeypatch.setattr(file, "torch", nan_torch)
    torch.manual_seed(1)


def blocks(form: str, outs: int, size: int, zero: int | None = None) -> BlockWeights:
    return to_blocks(draw(form, 1, outs, size, DEVICE, zero))


def product(
    x: Tensor, weights: BlockWeights, bias: Tensor | None = None, tiles: tuple[int, int, int] = TILES[0]
) -> Tensor:
    out_tile, warps, ahead = tiles
    pdl = torch.cuda.get_device_capability() >= (9, 0)
    return linear_blocks_mma(x, weights, bias, out_tile=out_tile, warps=warps, ahead=ahead, pdl=pdl)


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-9))
    assert error <= ERROR[got.dtype], f"relative error {error}"


def rows_of(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, size, device=DEVICE).to(dtype)


@on_gpu
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("form", FOUR_BITS)
def test_every_form(form: str, dtype: torch.dtype) -> None:
    """Incomplete tiles of rows, of outputs and of inputs; steps before and in the loop."""
    for tiles in TILES:
        for rows, outs, size in ((1, 75, 4096), (5, 16, 640), (9, 33, 2176), (16, 130, 128 * 33)):
            weights, x = blocks(form, outs, size), rows_of(rows, size, dtype)
            bias = rows_of(1, outs, dtype)[0]
            assert_close(product(x, weights, bias, tiles), linear_blocks_reference(x, weights, bias))


@on_gpu
@pytest.mark.parametrize("zero", [0, 15, 16])
def test_extreme_zeros(zero: int) -> None:
    weights, x = blocks("int4 g64 uint8 zeros", 19, 256, zero), rows_of(1, 256, torch.float16)
    assert_close(product(x, weights), linear_blocks_reference(x, weights))


@on_gpu
def test_inputs_that_end_within_a_block() -> None:
    weights, x = blocks("int4 g128", 40, 1000), rows_of(3, 1000, torch.bfloat16)
    assert_close(product(x, weights), linear_blocks_reference(x, weights))


@on_gpu
@pytest.mark.parametrize("form", ["int4 g128", "int4 rows"])
def test_nothing_behind_the_inputs_counts(form: str) -> None:
    """8 steps of 4 warps, seven at a time: most of the last ones have no inputs, and behind them are NaNs."""
    weights, x = blocks(form, 16, 4096), rows_of(1, 4096, torch.bfloat16)
    memory = torch.full((1, 8192), float("nan"), dtype=x.dtype, device=DEVICE)
    memory[:, :4096] = x
    assert_close(product(memory[:, :4096], weights, tiles=(16, 4, 7)), linear_blocks_reference(x, weights))


@on_gpu
def test_scales_of_0_and_huge_ones() -> None:
    weights, x = blocks("int4 g128", 19, 256), rows_of(1, 256, torch.float16)
    assert weights.scales is not None
    weights.scales[0] = 0
    weights.scales[1] = 100
    assert_close(product(x, weights), linear_blocks_reference(x, weights))
    weights.scales[:] = 0
    assert not product(x, weights).any()


@on_gpu
def test_a_row_does_not_depend_on_the_others() -> None:
    weights, x = blocks("nf4 g64", 50, 512), rows_of(16, 512, torch.bfloat16)
    together = product(x, weights)
    for row in (0, 7, 15):
        assert torch.equal(product(x[row : row + 1], weights), together[row : row + 1])
    assert torch.equal(product(x[4:12], weights), together[4:12])
    assert product(x[:0], weights).shape == (0, 50)


def test_what_does_not_fit_is_refused() -> None:
    weights, x = blocks("int4 g128", 8, 256), rows_of(17, 256, torch.float16)
    for some, match in ((x, "over 16"), (x[:1, :128].contiguous(), "do not fit"), (x[:1].float(), "of 16 bits")):
        with pytest.raises(ValueError, match=match):
            linear_blocks_mma(some, weights, None, out_tile=16, warps=4, ahead=1, pdl=False)
    with pytest.raises(ValueError, match="of 16 bits"):
        linear_blocks_mma(x[:1], blocks("int8 rows", 8, 256), None, out_tile=16, warps=4, ahead=1, pdl=False)


COMPILED = """
from blockyard.kernels.quantized.linear_blocks_mma import linear_blocks_mma
from blockyard.kernels.quantized.block_weights import to_blocks
from packed_experts import draw
torch.Tensor.is_cuda = True
for form in ("int4 g128", "int4 g64 uint8 zeros", "int4 rows", "nf4 g64", "nvfp4", "mxfp4"):
    weights = to_blocks(draw(form, 1, 128, 1024, "cpu"))
    x = torch.zeros(9, 1024, dtype=torch.bfloat16 if form != "nf4 g64" else torch.float16)
    linear_blocks_mma(x, weights, x[0, :128], out_tile=16, warps=8, ahead=2, pdl=True)
"""


def test_kernels_compile_for_an_h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "support"))
    assert len(shared_bytes(COMPILED, tmp_path)) == 6


EMULATED = """
from blockyard.kernels.quantized.block_weights import to_blocks
from blockyard.kernels.quantized.linear_blocks import linear_blocks_reference
from blockyard.kernels.quantized.linear_blocks_mma import linear_blocks_mma
from packed_experts import draw
from ptx.launches import emulate_launches
emulate_launches()
torch.manual_seed(1)
for form in ("nf4 g64", "int4 g64 uint8 zeros", "int4 g32 float zeros"):
    weights, x = to_blocks(draw(form, 1, 16, 512, "cpu")), torch.randn(3, 512, dtype=torch.bfloat16)
    got = linear_blocks_mma(x, weights, None, out_tile=16, warps=4, ahead=1, pdl=False).double()
    want = linear_blocks_reference(x, weights)
    assert float((got - want).norm() / want.norm()) < 1e-2
"""


def test_a_table_and_zeros_as_compiled_for_an_h100(tmp_path: Path) -> None:
    assert len(shared_bytes(EMULATED, tmp_path)) == 3
