"""Experts with quantized weights against float64, in every form: odd sizes, poisoned outputs, extreme scales, zeros."""

from dataclasses import replace
from typing import Any

import packed_experts
import pytest
import torch
from packed_experts import FORMS, draw, rounding_of
from torch import Tensor

from blockyard.kernels.layers.add_rms_norm import add_rms_norm
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.layers.rounding import InputRounding
from blockyard.kernels.moe import quantized_grouped, quantized_skinny
from blockyard.kernels.moe.experts_skinny import SkinnyTiling, down_skinny_reference, gate_up_skinny_reference
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import GroupedTiling, grouped_linear_reference
from blockyard.kernels.moe.map_experts import map_experts
from blockyard.kernels.moe.quantized_grouped import NATIVE, grouped_quantized, takes_codes
from blockyard.kernels.moe.quantized_skinny import down_quantized, gate_up_quantized
from blockyard.kernels.moe.round_rows import round_rows, round_rows_reference
from blockyard.kernels.quantized.packed_weights import (
    E8M0,
    Codes,
    ExpertRounding,
    PackedWeights,
    RoundedTo,
    dequantized,
)
from blockyard.kernels.quantized.quantize_rows import quantize_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.float16]  # each is compiled by itself
ERROR = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EXPERTS = 7


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, nan_torch: object) -> None:
    """New tensors are found if they are not written."""
    for file in (quantized_skinny, quantized_grouped):
        monkeypatch.setattr(file, "torch", nan_torch)
    torch.manual_seed(1)


def choose(rows: int, top_k: int) -> Tensor:
    """Different experts for the pairs of a row; the last expert has none."""
    return torch.rand(rows, EXPERTS - 1, device=DEVICE).topk(top_k).indices.int()


def error(got: Tensor, want: Tensor) -> float:
    assert got.shape == want.shape and not got.isnan().any()
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-9))


def seen(x: Tensor, rounding: ExpertRounding) -> Tensor:
    """What products see of x, float64."""
    if not rounding.kind:
        return x.double()
    codes, scales = round_rows_reference(x, rounding)
    group = rounding.group or x.shape[1]
    return codes.double() * scales.double().repeat_interleave(group, 1)[:, : x.shape[1]]


def grouped(
    x: Tensor, weights: PackedWeights, mapped: Any, pairs: int, tiling: GroupedTiling, rounding: ExpertRounding,
    **options: Any,
) -> Tensor:  # fmt: skip
    if not rounding.kind:
        return grouped_quantized(x, weights, mapped, pairs, tiling, x.dtype, **options)
    assert takes_codes(weights, rounding)
    codes, scales = round_rows(x, rounding)
    assert (codes.dtype == weights.codes.dtype) == (rounding.kind in NATIVE)
    return grouped_quantized(codes, weights, mapped, pairs, tiling, x.dtype, x_scales=scales, **options)


@pytest.mark.parametrize("form", ["int4 g128", "fp8 rows"])
def test_pairs_of_other_ranks_add_nothing(form: str) -> None:
    size, tiling, rounding = 128, SkinnyTiling(out_tile=4, in_tile=128, warps=4), rounding_of(form)
    experts, x = torch.tensor([[EXPERTS, 2]], dtype=torch.int32, device=DEVICE), torch.randn(1, size, device=DEVICE)
    gate_up, down = draw(form, EXPERTS, 2 * size, size, DEVICE), draw(form, EXPERTS, 9, size, DEVICE)
    inner = gate_up_quantized(x, gate_up, experts, tiling, Gate.SILU, rounding=rounding)
    alone = gate_up_quantized(x, gate_up, experts[:, 1:].contiguous(), tiling, Gate.SILU, rounding=rounding)
    assert torch.equal(inner[1:], alone)
    inner[0] = 1e30  # whatever was in memory
    options = {"rounding": rounding, "bias": torch.randn(EXPERTS, 9, device=DEVICE)}
    got = down_quantized(inner, down, experts, tiling, **options)
    assert error(got, down_quantized(alone, down, experts[:, 1:].contiguous(), tiling, **options)) <= 1e-6


@pytest.mark.parametrize(("size", "kind"), [(128, 1), (203, 0)])
@pytest.mark.parametrize("form", FORMS)
def test_few_rows(form: str, size: int, kind: int) -> None:
    dtype = DTYPES[kind % len(DTYPES)]
    rows, top_k, inner, tiling = 2, 3, 11, SkinnyTiling(out_tile=4, in_tile=128, warps=4)
    rounding, x = rounding_of(form), torch.randn(rows, size, device=DEVICE).to(dtype)
    experts, loads = choose(rows, top_k), torch.full((EXPERTS,), -1, dtype=torch.int32, device=DEVICE)
    weights = draw(form, EXPERTS, 2 * inner, size, DEVICE)
    got = gate_up_quantized(x, weights, experts, tiling, Gate.CLAMPED_SWIGLU, rounding=rounding, loads=loads)
    given = seen(x, rounding)
    want = grouped_linear_reference(given.float(), dequantized(weights), experts, gate=Gate.CLAMPED_SWIGLU)
    assert got.dtype == dtype and error(got, want) <= ERROR[dtype]
    assert loads.tolist() == experts.flatten().cpu().bincount(minlength=EXPERTS).tolist()
    weights, scale = draw(form, EXPERTS, 9, size, DEVICE), torch.rand(rows, top_k, device=DEVICE)
    pairs, bias = torch.randn(6, size, device=DEVICE).to(dtype), torch.randn(EXPERTS, 9, device=DEVICE).to(dtype)
    total = torch.randn(rows, 9, device=DEVICE).to(dtype)
    want = down_skinny_reference(seen(pairs, rounding).float(), dequantized(weights), experts, bias=bias, scale=scale)
    want += total.float()
    got = down_quantized(
        pairs, weights, experts, tiling, rounding=rounding, bias=bias, scale=scale, add_to=total
    )  # fmt: skip
    assert got is total and error(got, want) <= ERROR[dtype]


@pytest.mark.parametrize(("rows", "in_tile", "size", "kind"), [(1, 32, 203, 0), (5, 128, 256, 1), (17, 64, 203, 0)])
@pytest.mark.parametrize("form", FORMS)
def test_many_rows(form: str, rows: int, in_tile: int, size: int, kind: int) -> None:
    dtype = DTYPES[kind % len(DTYPES)]
    top_k, outs, tiling = 3, 22, GroupedTiling(out_tile=16, in_tile=in_tile, stages=2, warps=4)
    rounding, x = rounding_of(form), torch.randn(rows, size, device=DEVICE).to(dtype)
    experts, weights = choose(rows, top_k), draw(form, EXPERTS, outs, size, DEVICE)
    loads = torch.full((EXPERTS,), -1, dtype=torch.int32, device=DEVICE)
    is_few = rows <= 16
    mapped = experts if is_few else map_experts(experts, EXPERTS, 16, loads)
    bias, scale = torch.randn(EXPERTS, outs, device=DEVICE).to(dtype), torch.rand(rows, top_k, device=DEVICE)
    options: dict[str, Any] = {"bias": bias, "scale": scale, "gate": Gate.SILU, "scale_first": rows == 5}
    got = grouped(x, weights, mapped, 3 * rows, tiling, rounding, **options, loads=loads if is_few else None)
    want = grouped_linear_reference(seen(x, rounding).float(), dequantized(weights), experts, **options)
    assert got.dtype == dtype and error(got, want) <= ERROR[dtype]
    assert loads.tolist() == experts.flatten().cpu().bincount(minlength=EXPERTS).tolist()
    if is_few:
        return
    alone = grouped(x[:1], weights, map_experts(experts[:1], EXPERTS, 16), 3, tiling, rounding, bias=bias)
    whole = grouped(x, weights, map_experts(experts, EXPERTS, 16), 3 * rows, tiling, rounding, bias=bias)
    assert torch.equal(alone, whole[:3])  # whatever else is in a tile


@pytest.mark.parametrize("form", ["int4 g64 uint8 zeros", "int4 g32 float zeros", "uint8 g16 zeros"])
@pytest.mark.parametrize("zero", [0, 16, 255])
def test_extreme_zeros(form: str, zero: int) -> None:
    x, experts = torch.randn(2, 128, device=DEVICE), choose(2, 2)
    weights = draw(form, EXPERTS, 24, 128, DEVICE, zero=zero)
    assert weights.scales is not None
    weights = replace(weights, scales=weights.scales / 32)
    want = grouped_linear_reference(x, dequantized(weights), experts, gate=Gate.SILU)
    tiling = GroupedTiling(16, 128 if zero == 16 else 32, 2, 4)
    assert error(grouped(x, weights, experts, 4, tiling, ExpertRounding(), gate=Gate.SILU), want) <= 2e-5
    assert error(gate_up_quantized(x, weights, experts, SkinnyTiling(4, 64, 4), Gate.SILU), want) <= 2e-5


@pytest.mark.parametrize("form", ["int4 g128", "mxfp4", "nvfp4", "fp8 g128", "fp8 rows", "int8 inputs"])
@pytest.mark.parametrize("value", [0.0, 1e4])
def test_scales_of_zero_and_huge_ones(form: str, value: float) -> None:
    weights, rounding = draw(form, EXPERTS, 24, 256, DEVICE), rounding_of(form)
    x, experts = torch.randn(3, 256, device=DEVICE), choose(3, 2)
    x[1] = 0
    if weights.is_e8m0:
        assert weights.scales is not None
        weights.scales[:, ::2] = 0 if not value else 200
    elif weights.scales is not None:
        weights.scales[:, ::2] = min(value, 448.0)
    else:
        assert weights.row_scales is not None
        weights.row_scales[:, ::2] = value
    want = grouped_linear_reference(seen(x, rounding).float(), dequantized(weights), experts)
    got = grouped(x, weights, experts, 6, GroupedTiling(16, 64, 2, 4), rounding)
    assert error(got, want) <= 2e-5 and error(got[:, 1::2], want[:, 1::2]) <= 2e-5
    assert not got[2:4].any()
    got = down_quantized(x[:2].repeat(1, 1), weights, experts[:2, :1].contiguous(), SkinnyTiling(4, 128, 4),
                         rounding=rounding)  # fmt: skip
    want = down_skinny_reference(seen(x[:2], rounding).float(), dequantized(weights), experts[:2, :1])
    assert error(got[:1], want[:1]) <= 2e-5 and not got[1].any()


def test_norm_of_few_rows() -> None:
    x, experts, norm = torch.randn(2, 128, device=DEVICE), choose(2, 2), RMSNorm(torch.rand(128, device=DEVICE), 0.1)
    for form in ("int4 g64 uint8 zeros", "mxfp4", "uint8 g16 zeros"):
        weights = draw(form, EXPERTS, 24, 128, DEVICE)
        got = gate_up_quantized(x, weights, experts, SkinnyTiling(4, 64, 4), Gate.SILU, norm=norm)
        want = gate_up_skinny_reference(x, dequantized(weights), experts, Gate.SILU, norm=norm)
        assert error(got, want) <= 2e-5
    x = x.to(DTYPES[0])  # in float32 on a GPU two kernels with the same operations may differ in a last bit
    norm = RMSNorm(norm.weight.to(x.dtype), norm.eps)
    tiling, normed = SkinnyTiling(4, 128, 4), add_rms_norm(x, None, norm.weight, norm.eps)
    for form in ("fp8 rows", "fp8 g32", "int8 inputs with zeros"):
        weights, rounding = draw(form, EXPERTS, 24, 128, DEVICE), rounding_of(form)
        got = gate_up_quantized(x, weights, experts, tiling, Gate.SILU, norm=norm, rounding=rounding)
        want = gate_up_quantized(normed, weights, experts, tiling, Gate.SILU, rounding=rounding)
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [RoundedTo.E4M3, RoundedTo.INT8, RoundedTo.ASYMMETRIC_INT8])
@pytest.mark.parametrize("scaled_by", ["rows", "bounded rows", "groups", "file"])
@pytest.mark.parametrize("size", [64, 300, 9000])  # one tile, one that is not full, two
def test_rounded_rows(size: int, scaled_by: str, kind: RoundedTo, dtype: torch.dtype) -> None:
    x = (torch.randn(5, size, device=DEVICE) * torch.tensor([[1.0], [0.0], [1e-3], [100.0], [3.0]], device=DEVICE)).to(
        dtype
    )
    rounding = ExpertRounding(kind=kind)
    if scaled_by == "bounded rows":
        rounding = replace(rounding, most=2.0)
    elif scaled_by == "groups":
        if kind is not RoundedTo.E4M3:
            pytest.skip("integers have no groups of inputs")
        x, rounding = x[:, :1000], replace(rounding, group=128)
        x = x.contiguous()
    elif scaled_by == "file":
        high = torch.tensor(0.02 if kind is not RoundedTo.ASYMMETRIC_INT8 else 2.0, device=DEVICE)
        low = torch.tensor(1.5, device=DEVICE) if kind is RoundedTo.ASYMMETRIC_INT8 else None
        rounding = replace(rounding, high=high, low=low)
    codes, scales = round_rows(x, rounding)
    want, want_scales = round_rows_reference(x, rounding)
    torch.testing.assert_close(scales, want_scales)
    assert (codes.float() != want).float().mean() <= (1e-3 if DEVICE == "cuda" else 0)


@pytest.mark.parametrize("given", [{}, {"most": 0.7}, {"group": 128}, {"scale": 0.02}, {"scale": 0.0}])
@pytest.mark.parametrize("kind", [RoundedTo.E4M3, RoundedTo.INT8])
def test_rows_have_the_bits_of_those_of_linear_layers(kind: RoundedTo, given: dict[str, float]) -> None:
    given = dict(given)
    scale = torch.tensor(given.pop("scale"), device=DEVICE) if "scale" in given else None
    dtype = torch.float8_e4m3fn if kind is RoundedTo.E4M3 else torch.int8
    x = torch.randn(4, 300, device=DEVICE) * torch.tensor([[1.0], [0.0], [1e-3], [100.0]], device=DEVICE)
    codes, scales = round_rows(x, ExpertRounding(kind=kind, high=scale, **given))
    want = quantize_rows(x, InputRounding(dtype, scale=scale, **given))
    assert torch.equal(codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(scales, want.scales.reshape(scales.shape) if scale is None else want.scales[:, None])


def test_keys_and_refusals() -> None:
    names = {name: draw(name, 1, 2, 256, DEVICE).key for name in FORMS if rounding_of(name).kind is RoundedTo.NONE}
    assert len(set(names.values())) == len(names)
    weights = draw("int4 g64 uint8 zeros", EXPERTS, 24, 128, DEVICE)
    x, experts = torch.randn(1, 128, device=DEVICE), choose(1, 2)
    with pytest.raises(ValueError, match="scales and zeros must be"):
        gate_up_quantized(x, replace(weights, group=32), experts, SkinnyTiling(4, 64, 4), Gate.SILU)
    with pytest.raises(ValueError, match="codes of a table have one"):
        gate_up_quantized(x, replace(weights, kind=Codes.TABLE4), experts, SkinnyTiling(4, 64, 4), Gate.SILU)
    with pytest.raises(ValueError, match="do not fit weights"):
        grouped_quantized(x.half(), weights, experts, 2, GroupedTiling(16, 64, 2, 4), torch.float32)
    assert E8M0.itemsize == 1 and packed_experts.FORMS
