"""Products of experts with weights of 4 bits on tensor cores against float64, on any device that launches kernels."""

from dataclasses import dataclass

import torch
from packed_experts import draw
from torch import Tensor

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.experts_skinny import down_skinny_reference
from blockyard.kernels.moe.four_bits.grouped_mma import grouped_mma
from blockyard.kernels.moe.four_bits.mma_form import MmaForm, MmaTiling, mma_form
from blockyard.kernels.moe.four_bits.row_sums import row_sums
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.grouped_linear import grouped_linear_reference
from blockyard.kernels.moe.map_experts import map_experts_reference
from blockyard.kernels.quantized.packed_weights import PackedWeights, dequantized

EXPERTS, TOP_K = 5, 3
ERROR = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    form: str  # of `packed_experts`
    rows: int
    inputs: int
    outs: int
    tiling: MmaTiling
    dtype: torch.dtype = torch.bfloat16
    gate: Gate = Gate.NONE
    tile: int = 0  # of a map; 0: there is none
    scale_first: bool = False
    normed: bool = False


def choose(rows: int, device: str) -> Tensor:
    """Different experts for the pairs of a row; the last expert has none."""
    return torch.rand(rows, EXPERTS - 1, device=device).topk(TOP_K).indices.int()


def weights_of(case: Case, device: str) -> tuple[PackedWeights, MmaForm]:
    weights = draw(case.form, EXPERTS, case.outs, case.inputs, device)
    form = mma_form(weights, case.dtype)
    assert form is not None
    return weights, form


def assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and not got.isnan().any()
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-9))
    assert error <= ERROR[got.dtype], f"relative error {error}"


def check_grouped(case: Case, device: str) -> None:
    (weights, form), experts = weights_of(case, device), choose(case.rows, device)
    x = torch.randn(case.rows, case.inputs, device=device).to(case.dtype)
    bias = torch.randn(EXPERTS, case.outs, device=device).to(case.dtype)
    scale, pairs = torch.rand(case.rows, TOP_K, device=device), case.rows * TOP_K
    loads = torch.full((EXPERTS,), -1, dtype=torch.int32, device=device)
    mapped = map_experts_reference(experts, EXPERTS, case.tile) if case.tile else experts
    norm = RMSNorm(torch.rand(case.inputs, device=device), 0.1) if case.normed else None
    got = grouped_mma(
        x, weights, form, mapped, pairs, case.tiling, norm=norm, bias=bias, gate=case.gate, scale=scale,
        scale_first=case.scale_first, loads=None if case.tile else loads,
    )  # fmt: skip
    given = x.float() if norm is None else norm(x.float())
    want = grouped_linear_reference(
        given, dequantized(weights), experts, bias=bias, gate=case.gate, scale=scale, scale_first=case.scale_first
    )
    assert_close(got, want)
    if not case.tile:
        assert loads.tolist() == experts.flatten().cpu().bincount(minlength=EXPERTS).tolist()


def check_sums(case: Case, device: str) -> None:
    (weights, form), experts = weights_of(case, device), choose(case.rows, device)
    pairs = torch.randn(case.rows * TOP_K, case.inputs, device=device).to(case.dtype)
    bias = torch.randn(EXPERTS, case.outs, device=device).to(case.dtype)
    scale = torch.rand(case.rows, TOP_K, device=device)
    total, shared = (torch.randn(case.rows, case.outs, device=device).to(case.dtype) for _ in range(2))
    want = down_skinny_reference(pairs.float(), dequantized(weights), experts, bias=bias, scale=scale)
    want += total.float() + shared.float()
    got = row_sums(pairs, weights, form, experts, case.tiling, bias=bias, scale=scale, shared=shared, add_to=total)
    assert got is total
    assert_close(got, want)


# of each layout of scales and zeros; incomplete blocks, chunks and tiles; more and fewer steps than are ahead
GROUPED = (
    Case(form="mxfp4", rows=1, inputs=416, outs=38, tiling=MmaTiling(16, 2, 1), gate=Gate.CLAMPED_SWIGLU),
    Case(form="mxfp4", rows=5, inputs=96, outs=20, tiling=MmaTiling(16, 2, 1)),
    Case(form="int4 g64 uint8 zeros", rows=17, inputs=160, outs=22, tiling=MmaTiling(32, 2, 1), tile=16),
    Case(form="nvfp4", rows=9, inputs=256, outs=40, tiling=MmaTiling(16, 2, 2), dtype=torch.float16, scale_first=True),
    Case(form="int4 g128", rows=2, inputs=288, outs=36, tiling=MmaTiling(16, 2, 1), gate=Gate.SILU, normed=True),
    Case(form="mxfp4", rows=1, inputs=416, outs=38, tiling=MmaTiling(32, 1, 2), gate=Gate.SILU, normed=True),
    Case(form="int4 g128", rows=3, inputs=288, outs=36, tiling=MmaTiling(32, 1, 1), gate=Gate.SILU, tile=8),
    Case(form="mxfp4", rows=17, inputs=416, outs=22, tiling=MmaTiling(32, 1, 2), tile=16),
    Case(form="mxfp4", rows=17, inputs=416, outs=70, tiling=MmaTiling(64, 1, 1, 0, 0, 2), tile=16),
    Case(form="int4 g128", rows=9, inputs=288, outs=72, tiling=MmaTiling(64, 2, 1, 0, 0, 2), tile=8, gate=Gate.SILU),
    Case(form="mxfp4", rows=17, inputs=672, outs=22, tiling=MmaTiling(16, 2, 2, 0, 1), tile=16),
    Case(form="int4 g128", rows=1, inputs=1056, outs=36, tiling=MmaTiling(16, 2, 3, 0, 1), normed=True, gate=Gate.SILU),
)
SUMS = (
    Case(form="nf4 g64", rows=2, inputs=288, outs=18, tiling=MmaTiling(16, 2, 1)),
    Case(form="mxfp4", rows=2, inputs=416, outs=20, tiling=MmaTiling(16, 2, 3, 0, 1)),
    Case(form="int4 rows uint8 zeros", rows=1, inputs=256, outs=16, tiling=MmaTiling(16, 4, 2)),
)
