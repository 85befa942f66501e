"""Products of rounded rows with weights of 8 bits against float64: odd sizes, groups, bounds, poisoned memory."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace
from blockyard.kernels.layers.rounding import E4M3, InputRounding, RoundedRows
from blockyard.kernels.quantized import linear_w8a8_skinny as few_file
from blockyard.kernels.quantized import linear_w8a8_stream_k as rows_file
from blockyard.kernels.quantized.linear_w8a8_skinny import linear_w8a8_skinny
from blockyard.kernels.quantized.linear_w8a8_stream_k import linear_w8a8_stream_k
from blockyard.kernels.quantized.operands import Weight8Bit, linear_w8a8_reference
from blockyard.kernels.quantized.quantize_rows import quantize_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PDL = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
FP8_SUMS = 8e-4 if DEVICE == "cuda" else 0.0  # relative error of sums on tensor cores, which keep 14 bits of them
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
KINDS = [(E4M3, None, 1), (E4M3, 128, 1), (E4M3, 128, 128), (torch.int8, None, 1)]  # group, outputs of its scale


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills outputs with NaN, so that unwritten elements are found."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    def empty(shape: tuple[int, ...], **options: Any) -> Tensor:
        return torch.full(shape, float("nan"), **options)

    for file in (few_file, rows_file):
        monkeypatch.setattr(file, "torch", Torch())


def operands(
    rows: int, size: int, outs: int, dtype: torch.dtype, kind: tuple[torch.dtype, int | None, int]
) -> tuple[RoundedRows, Weight8Bit]:
    codes_dtype, group, block = kind
    x = torch.randn(rows, size, device=DEVICE).to(dtype)
    if rows > 1:
        x[1] = 0
    if rows > 2:
        x[2] *= 20
    weight = quantize_rows(torch.randn(outs, size, device=DEVICE), InputRounding(codes_dtype, group))
    scales = weight.scales[::block].contiguous()
    scales[0] = 0 if len(scales) > 1 else scales[0]
    scales[-1] *= 10
    return quantize_rows(x, InputRounding(codes_dtype, group)), Weight8Bit(weight.codes, scales, group, block)


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, sums: float = 0.0) -> None:
    assert got.shape == want.shape
    assert got.dtype == dtype
    assert not got.isnan().any()
    for row in range(len(want)):  # rows differ by orders of magnitude
        error = float((got[row].double() - want[row]).norm() / want[row].norm().clamp_min(1e-12))
        assert error <= max(ERROR[dtype], sums), f"relative error {error} of row {row}"


def vector(outs: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(outs, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("rows", "size", "outs", "around"),
    [
        (1, 576, 33, "bias"),
        (2, 200, 8, ""),
        (3, 129, 5, "bias, add"),
        (8, 304, 17, "add"),
        (0, 64, 4, ""),
    ],
)
def test_few_rows(
    rows: int, size: int, outs: int, around: str, kind: tuple[torch.dtype, int | None, int], dtype: torch.dtype
) -> None:
    x, weight = operands(rows, size, outs, dtype, kind)
    bias = vector(outs, dtype) if "bias" in around else None
    total = torch.randn(rows, outs, device=DEVICE).to(dtype) if "add" in around else None
    want = linear_w8a8_reference(x, weight, bias)
    want = want if total is None else want + total.double()
    for early in (1, 3)[rows % 2 :]:
        given = None if total is None else total.clone()
        got = linear_w8a8_skinny(x, weight, bias, out_tile=4, tile=128, warps=4, pdl=PDL, early=early, add_to=given)
        assert_close(got, want, dtype)
        assert given is None or got is given


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(
    ("rows", "size", "outs", "bias", "split"),
    [(5, 576, 70, True, 1), (17, 1040, 130, False, 3), (0, 64, 64, False, 2)],
)
def test_rows(
    rows: int,
    size: int,
    outs: int,
    bias: bool,
    split: int,
    kind: tuple[torch.dtype, int | None, int],
    dtype: torch.dtype,
) -> None:
    x, weight = operands(rows, size, outs, dtype, kind)
    given = vector(outs, dtype) if bias else None
    space, tiling = workspace(), tiling_of()
    got = linear_w8a8_stream_k(x, weight, given, tiling, space, split)
    assert_close(got, linear_w8a8_reference(x, weight, given), dtype, FP8_SUMS if kind[0] == E4M3 else 0.0)
    assert not space.arrived.any(), "the next kernel would take parts that are not its own"
    for some in (slice(0, 1), slice(rows // 2, rows)):  # a row does not depend on the others
        alone = RoundedRows(x.codes[some], x.scales[some], dtype)
        assert torch.equal(linear_w8a8_stream_k(alone, weight, given, tiling, space, split), got[some])
    if rows:
        small = workspace(2 * split * -(-outs // 64))
        assert torch.equal(linear_w8a8_stream_k(x, weight, given, tiling, small, split), got)


def tiling_of() -> Tiling:
    return Tiling(out_tile=64, row_tile=16, in_tile=64, stages=3, warps=4, pdl=PDL)


def workspace(programs: int = 64) -> Workspace:
    return Workspace(programs * 64 * 16, programs, torch.device(DEVICE))


def test_what_does_not_fit_is_refused() -> None:
    x, weight = operands(2, 256, 8, torch.float16, (E4M3, 128, 1))

    def weight_of(codes: Tensor) -> Weight8Bit:
        return Weight8Bit(codes, weight.scales, weight.group, weight.block)

    few: dict[str, Any] = {"out_tile": 4, "tile": 64, "warps": 4, "pdl": False}
    for call in (
        lambda x, w, bias=None: linear_w8a8_skinny(x, w, bias, **few),
        lambda x, w, bias=None: linear_w8a8_stream_k(x, w, bias, tiling_of()),
    ):
        with pytest.raises(ValueError, match="do not fit a weight"):
            call(x, weight_of(weight.codes[:, :128].contiguous()))
        with pytest.raises(ValueError, match="do not fit a weight"):
            call(x, weight, vector(4, torch.float16))
        with pytest.raises(ValueError, match="do not fit groups"):
            call(x, Weight8Bit(weight.codes, weight.scales, None, weight.block))
        with pytest.raises(ValueError, match="dtypes differ"):
            call(RoundedRows(x.codes.float().to(torch.int8), x.scales, x.dtype), weight)
        with pytest.raises(ValueError, match="contiguous"):
            call(x, weight_of(weight.codes.T.contiguous().T))
    with pytest.raises(ValueError, match="over 8"):
        linear_w8a8_skinny(operands(9, 256, 8, torch.float16, (E4M3, 128, 1))[0], weight, None, **few)
    with pytest.raises(ValueError, match="do not divide"):
        tiling = Tiling(out_tile=64, row_tile=16, in_tile=256, stages=3, warps=4, pdl=False)
        linear_w8a8_stream_k(x, weight, None, tiling)
    with pytest.raises(ValueError, match="too small"):
        linear_w8a8_stream_k(x, weight, None, tiling_of(), workspace(1), 2)
