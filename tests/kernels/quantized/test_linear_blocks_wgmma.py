"""Products of Hopper's warp groups with weights of 4 bits, against float64: on a GPU, Gluon has no interpreter."""

from pathlib import Path

import pytest
import torch
from compile_for_hopper import SHARED, shared_bytes
from packed_experts import FORMS, draw
from torch import Tensor
from triton.experimental.gluon import language as gl

from blockyard.kernels.gpu_facts import runs_hopper_kernels
from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace
from blockyard.kernels.quantized import linear_blocks_wgmma as file
from blockyard.kernels.quantized.block_weights import BLOCK, BlockWeights, to_blocks
from blockyard.kernels.quantized.linear_blocks import linear_blocks_reference
from blockyard.kernels.quantized.linear_blocks_wgmma import can_multiply, linear_blocks_wgmma
from blockyard.kernels.quantized.packed_weights import Codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_hopper = pytest.mark.skipif(not runs_hopper_kernels(torch.device(DEVICE)), reason="no GPU of compute capability 9.0")
ERROR = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
FOUR_BITS = [name for name in FORMS if FORMS[name][0] in (Codes.INT4, Codes.E2M1, Codes.TABLE4) and name != "int4 g48"]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, nan_torch: object) -> None:
    """New tensors are found if they are not written."""
    monkeypatch.setattr(file, "torch", nan_torch)
    torch.manual_seed(1)


@pytest.fixture(scope="module")
def workspace() -> Workspace:
    return Workspace(9 << 20, 1 << 10, torch.device(DEVICE))


def blocks(form: str, outs: int, size: int, zero: int | None = None) -> BlockWeights:
    return to_blocks(draw(form, 1, outs, size, DEVICE, zero))


def product(
    x: Tensor, weights: BlockWeights, workspace: Workspace, bias: Tensor | None = None, row_tile: int = 64,
    stages: int = 4, programs: int = 3, warps: int = 16,
) -> Tensor:  # fmt: skip
    tiling = Tiling(file.OUT_TILE, row_tile, BLOCK, stages, warps, pdl=True)
    return linear_blocks_wgmma(x, weights, bias, tiling, workspace, programs)


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    error = float((got.double() - want).norm() / want.norm().clamp_min(1e-9))
    assert error <= ERROR[got.dtype], f"relative error {error}"


def rows_of(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, size, device=DEVICE).to(dtype)


@on_hopper
@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("form", FOUR_BITS)
def test_every_form(form: str, dtype: torch.dtype, workspace: Workspace) -> None:
    """Incomplete tiles of rows, of outputs and of inputs; tiles of one program, parts of several, and more stages than
    steps."""
    for row_tile, stages, rows, outs, size, programs, warps in (
        (16, 3, 16, 272, 4096, 7, 16), (32, 4, 17, 48, 640, 1, 16), (64, 4, 61, 528, 2176, 2, 16),
        (64, 2, 100, 304, 128 * 33, 9, 8), (128, 3, 129, 256, 1024, 3, 8), (64, 5, 64, 256, 128 * 33, 11, 16),
    ):  # fmt: skip
        weights, x = blocks(form, outs, size), rows_of(rows, size, dtype)
        if not can_multiply(weights, dtype):
            assert dtype == torch.float16
            continue
        bias = rows_of(1, outs, dtype)[0]
        for _ in range(2):  # the first one leaves the flags as it found them
            got = product(x, weights, workspace, bias, row_tile, stages, programs, warps)
            assert_close(got, linear_blocks_reference(x, weights, bias))
    assert not workspace.arrived.any()


@on_hopper
@pytest.mark.parametrize("zero", [0, 15, 16])
def test_extreme_zeros(zero: int, workspace: Workspace) -> None:
    weights, x = blocks("int4 g64 uint8 zeros", 32, 256, zero), rows_of(20, 256, torch.bfloat16)
    assert_close(product(x, weights, workspace), linear_blocks_reference(x, weights))


@on_hopper
def test_inputs_that_end_within_a_block(workspace: Workspace) -> None:
    weights, x = blocks("int4 g128", 48, 1000), rows_of(30, 1000, torch.bfloat16)
    assert_close(product(x, weights, workspace), linear_blocks_reference(x, weights))


@on_hopper
def test_scales_of_0_and_huge_ones(workspace: Workspace) -> None:
    weights, x = blocks("int4 g128", 32, 256), rows_of(20, 256, torch.float16)
    assert weights.scales is not None
    weights.scales[0] = 0
    weights.scales[1] = 100
    assert_close(product(x, weights, workspace), linear_blocks_reference(x, weights))
    weights.scales[:] = 0
    assert not product(x, weights, workspace).any()


@on_hopper
def test_scales_that_the_dtype_of_rows_would_round(workspace: Workspace) -> None:
    """Each weight is rounded once, as if its scale had not been."""
    weights = blocks("int4 g128", 16, 256)
    assert weights.scales is not None and weights.scales.dtype == torch.float16
    x = torch.eye(256, dtype=torch.bfloat16, device=DEVICE)
    got, want = product(x, weights, workspace), linear_blocks_reference(x, weights)
    assert float(((got.double() - want).abs() / want.abs().clamp_min(1e-9)).max()) <= 2.0**-8 * 1.02


@on_hopper
def test_a_row_does_not_depend_on_the_others(workspace: Workspace) -> None:
    weights, x = blocks("nf4 g64", 48, 512), rows_of(64, 512, torch.bfloat16)
    together = product(x, weights, workspace)
    for row in (0, 7, 63):
        assert torch.equal(product(x[row : row + 1], weights, workspace), together[row : row + 1])
    assert torch.equal(product(x[5:40], weights, workspace), together[5:40])
    assert product(x[:0], weights, workspace).shape == (0, 48)


def test_what_does_not_fit_is_refused(workspace: Workspace) -> None:
    weights, x = blocks("int4 g128", 16, 256), rows_of(17, 256, torch.float16)
    for some, match in ((x[:1, :128].contiguous(), "do not fit"), (x.float(), "of 16 bits")):
        with pytest.raises(ValueError, match=match):
            product(some, weights, workspace)
    for form, outs, dtype in (("int8 rows", 16, x.dtype), ("int4 g128", 24, x.dtype), ("mxfp4", 16, x.dtype)):
        assert not can_multiply(blocks(form, outs, 256), dtype)
        with pytest.raises(ValueError, match="of 16 bits"):
            product(x, blocks(form, outs, 256), workspace)
    with pytest.raises(ValueError, match="too small"):
        product(x, weights, Workspace(1, 1, torch.device(DEVICE)))
    for out_tile, in_tile, warps in ((128, BLOCK, 8), (256, 2 * BLOCK, 8), (256, BLOCK, 4)):
        with pytest.raises(ValueError, match="must have 256 outputs, 128 inputs and 8 or 16 warps"):
            linear_blocks_wgmma(x, weights, None, Tiling(out_tile, 64, in_tile, 4, warps, True), workspace, 1)


COMPILED = """
from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace
from blockyard.kernels.quantized.block_weights import BLOCK, to_blocks
from blockyard.kernels.quantized.linear_blocks_wgmma import linear_blocks_wgmma
from packed_experts import draw
space = Workspace(9 << 20, 1 << 10, torch.device("cpu"))
for form, row_tile, stages, dtype, warps in (
    ("int4 g128", 128, 4, torch.bfloat16, 8), ("int4 g32 float zeros", 32, 5, torch.bfloat16, 16),
    ("int4 rows uint8 zeros", 16, 5, torch.float16, 16), ("nvfp4", 64, 5, torch.bfloat16, 16),
):
    weights = to_blocks(draw(form, 1, 256, 1024, "cpu"))
    x = torch.zeros(17, 1024, dtype=dtype)
    linear_blocks_wgmma(x, weights, x[0, :256], Tiling(256, row_tile, BLOCK, stages, warps, True), space, 2)
"""


@pytest.mark.skipif(not hasattr(gl, "thread_barrier"), reason="this Triton has other names in Gluon")
def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    found = shared_bytes(COMPILED, tmp_path)
    assert len(found) == 4 and all(size <= SHARED for _, size in found)
