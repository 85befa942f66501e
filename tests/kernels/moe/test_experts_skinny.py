"""The experts of few rows in two kernels against their references: odd sizes, poisoned outputs, sums added in place."""

import pytest
import torch
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe import experts_skinny as skinny_file
from blockyard.kernels.moe.experts_skinny import (
    SkinnyTiling,
    down_skinny,
    down_skinny_reference,
    gate_up_skinny,
    gate_up_skinny_reference,
)
from blockyard.kernels.moe.gates import Gate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
TILING = SkinnyTiling(out_tile=4, in_tile=32, warps=4)
NUM_EXPERTS, SIZE, OUTS = 9, 40, 22  # two tiles of inputs and a few outputs more than whole tiles


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, nan_torch: object) -> None:
    """New tensors are found if they are not written."""
    monkeypatch.setattr(skinny_file, "torch", nan_torch)


def choose(rows: int, top_k: int) -> Tensor:
    """Different experts for the pairs of a row; the last expert has none."""
    return torch.rand(rows, NUM_EXPERTS - 1, device=DEVICE).topk(top_k).indices.int()


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape and not got.isnan().any()
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-9))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", [Gate.SILU, Gate.GELU_TANH, Gate.CLAMPED_SWIGLU])
@pytest.mark.parametrize(("rows", "top_k"), [(1, 1), (1, 6), (3, 2)])
@pytest.mark.parametrize("form", ["plain", "bias", "scaled", "normalised"])
def test_gate_and_up(form: str, rows: int, top_k: int, gate: Gate, dtype: torch.dtype) -> None:
    x = torch.randn(rows, SIZE, device=DEVICE).to(dtype)
    weight = (torch.randn(NUM_EXPERTS, OUTS, SIZE, device=DEVICE) / 6).to(dtype)
    bias = torch.randn(NUM_EXPERTS, OUTS, device=DEVICE).to(dtype) if form == "bias" else None
    scale = torch.rand(rows, top_k, device=DEVICE) if form == "scaled" else None
    norm = RMSNorm(torch.rand(SIZE, device=DEVICE), 0.1) if form == "normalised" else None
    options = {"bias": bias, "scale": scale, "norm": norm}
    experts, loads = choose(rows, top_k), torch.full((NUM_EXPERTS,), -1, dtype=torch.int32, device=DEVICE)
    got = gate_up_skinny(x, weight, experts, TILING, gate, loads=loads, **options)
    want = gate_up_skinny_reference(x, weight, experts, gate, **options)
    assert got.dtype == dtype and error(got, want) <= ERROR[dtype]
    assert loads.tolist() == experts.flatten().cpu().bincount(minlength=NUM_EXPERTS).tolist()
    assert torch.equal(got, gate_up_skinny(x, weight, experts, TILING, gate, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "top_k"), [(1, 1), (1, 6), (3, 2)])
@pytest.mark.parametrize("form", ["plain", "bias and scale"])
@pytest.mark.parametrize("behind", ["", "shared", "residual", "shared and residual"])
def test_sums_of_down(behind: str, form: str, rows: int, top_k: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows * top_k, SIZE, device=DEVICE).to(dtype)
    weight = (torch.randn(NUM_EXPERTS, OUTS, SIZE, device=DEVICE) / 6).to(dtype)
    bias = torch.randn(NUM_EXPERTS, OUTS, device=DEVICE).to(dtype) if form != "plain" else None
    scale = torch.rand(rows, top_k, device=DEVICE) if form != "plain" else None
    shared = torch.randn(rows, OUTS, device=DEVICE).to(dtype) if "shared" in behind else None
    residual = torch.randn(rows, OUTS, device=DEVICE).to(dtype) if "residual" in behind else None
    experts = choose(rows, top_k)
    options = {"bias": bias, "scale": scale, "shared": shared}
    want = down_skinny_reference(x, weight, experts, add_to=residual, **options)
    got = down_skinny(x, weight, experts, TILING, add_to=residual, **options)
    assert got.dtype == dtype and error(got, want) <= ERROR[dtype]
    assert residual is None or got is residual


@pytest.mark.parametrize("rows", [1, 2])
def test_pairs_of_other_ranks_add_nothing(rows: int) -> None:
    """Their rows stay as they were between the products, even not a number."""
    x, top_k = torch.randn(rows, SIZE, device=DEVICE), 3
    weights = [
        torch.randn(NUM_EXPERTS, OUTS, SIZE, device=DEVICE),
        torch.randn(NUM_EXPERTS, SIZE, OUTS // 2, device=DEVICE),
    ]
    bias, scale = torch.randn(NUM_EXPERTS, SIZE, device=DEVICE), torch.rand(rows, top_k, device=DEVICE)
    experts = choose(rows, top_k)
    experts[:, 1] = NUM_EXPERTS
    inner = gate_up_skinny(x, weights[0], experts, TILING, Gate.SILU)
    here = (experts < NUM_EXPERTS).flatten()
    assert inner[~here].isnan().all() and not inner[here].isnan().any()
    own = experts.clamp(max=NUM_EXPERTS - 1)
    want = gate_up_skinny_reference(x, weights[0], own, Gate.SILU)
    assert error(inner[here], want[here]) <= ERROR[torch.float32]
    got = down_skinny(inner, weights[1], experts, TILING, bias=bias, scale=scale)
    want = down_skinny_reference(want, weights[1], own, bias=bias, scale=scale * here.view(rows, top_k))
    assert error(got, want) <= ERROR[torch.float32]


def test_no_rows() -> None:
    weight = torch.randn(NUM_EXPERTS, OUTS, SIZE, device=DEVICE)
    experts = torch.empty(0, 2, dtype=torch.int32, device=DEVICE)
    assert gate_up_skinny(weight[0, :0], weight, experts, TILING, Gate.SILU).shape == (0, OUTS // 2)
    assert down_skinny(weight[0, :0], weight, experts, TILING).shape == (0, OUTS)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bias": torch.zeros(OUTS)}, "bias"),
        ({"scale": torch.zeros(3)}, "scale"),
        ({"x": torch.zeros(2, SIZE + 1)}, "do not fit"),
        ({"x": torch.zeros(3, SIZE)}, "do not fit"),
        ({"experts": torch.zeros(2, 2)}, "int32"),
        ({"weight": torch.zeros(NUM_EXPERTS, SIZE, OUTS).mT}, "contiguous"),
    ],
)
def test_operands_that_do_not_fit(wrong: dict[str, Tensor], message: str) -> None:
    x, weight = torch.zeros(2, SIZE), torch.zeros(NUM_EXPERTS, OUTS, SIZE)
    given = {"x": x, "weight": weight, "experts": torch.zeros(2, 2, dtype=torch.int32)} | wrong
    with pytest.raises(ValueError, match=message):
        gate_up_skinny(**given, tiling=TILING, gate=Gate.SILU)
    given["x"] = given["x"].repeat_interleave(2, 0)
    with pytest.raises(ValueError, match=message):
        down_skinny(**given, tiling=TILING)


def test_what_products_write_fits() -> None:
    x, weight, experts = torch.zeros(2, SIZE), torch.zeros(NUM_EXPERTS, OUTS, SIZE), torch.zeros(2, 1).int()
    with pytest.raises(ValueError, match="gate"):
        gate_up_skinny(x, weight, experts, TILING, Gate.NONE)
    with pytest.raises(ValueError, match="the norm's"):
        gate_up_skinny(x, weight, experts, TILING, Gate.SILU, norm=RMSNorm(torch.ones(3), 1e-6))
    with pytest.raises(ValueError, match="loads must be"):
        gate_up_skinny(x, weight, experts, TILING, Gate.SILU, loads=torch.zeros(3).int())
    for name in ("shared", "add_to"):
        with pytest.raises(ValueError, match="is not contiguous"):
            down_skinny(x, weight, experts, TILING, **{name: torch.zeros(2, SIZE)})
