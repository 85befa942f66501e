"""Kernels of experts are compiled for an H100, with programmatic dependent launch: they fit its memory."""

from pathlib import Path

from compile_for_hopper import SHARED, shared_bytes

LAUNCHES = """
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe import combine_experts, experts_skinny, grouped_linear, map_experts, route_experts
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.routing import Routing
from blockyard.kernels.moe.experts_skinny import SkinnyTiling
from blockyard.kernels.moe.grouped_linear import GroupedTiling
from blockyard.services.gpu_worker.layers.moe.expert_configs import ExpertShape, candidates

for file in (combine_experts, experts_skinny, grouped_linear, map_experts, route_experts):
    file.supports_pdl = lambda device: True
x, inner, total = (torch.zeros(*size).bfloat16() for size in ((1, 2048), (8, 768), (1, 4096)))
weight = torch.zeros(2, 1536, 2048).bfloat16()
route_experts.route_experts(torch.zeros(1, 128).bfloat16(), Routing(num_experts=128, top_k=8))
experts, scale, loads = torch.zeros(1, 8).int(), torch.zeros(1, 8), torch.zeros(2).int()
config, *_, few = candidates(ExpertShape(128, 8, 2048, 768), 1)
gate_up, down = SkinnyTiling(*config.gate_up), SkinnyTiling(*config.down)
norm = RMSNorm(x[0], 1e-6)
experts_skinny.gate_up_skinny(x, weight, experts, gate_up, Gate.SILU, norm=norm, loads=loads)
experts_skinny.down_skinny(inner, weight.view(2, 4096, 768), experts, down, scale=scale, add_to=total)
mapped = map_experts.map_experts(experts, 2, 16)
for some in (experts, mapped):
    grouped_linear.grouped_linear(x, weight, some, 8, GroupedTiling(*few.gate_up), gate=Gate.SILU, loads=loads)
combine_experts.combine_experts(inner, 8)
combine_experts.combine_experts(inner, 8, None, experts, 2)
"""
QUANTIZED = """
from packed_experts import draw, rounding_of
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe import map_experts, quantized_grouped, quantized_skinny, round_rows
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.moe.experts_skinny import SkinnyTiling
from blockyard.kernels.moe.grouped_linear import GroupedTiling
from blockyard.services.gpu_worker.layers.moe.expert_configs import QUANTIZED_GROUPED, QUANTIZED_SKINNY, ROUNDING_SKINNY

for file in (map_experts, quantized_grouped, quantized_skinny, round_rows):
    file.supports_pdl = lambda device: True
x, inner = torch.zeros(1, 2048).bfloat16(), torch.zeros(8, 768).bfloat16()
experts, scale = torch.zeros(1, 8).int(), torch.zeros(1, 8)
norm = RMSNorm(x[0], 1e-6)
for form in ("int4 g128", "mxfp4", "fp8 g128", "int8 inputs"):
    gate_up, down = draw(form, 2, 1536, 2048, "cpu"), draw(form, 2, 2048, 768, "cpu")
    rounding = rounding_of(form)
    few = (ROUNDING_SKINNY if rounding.kind else QUANTIZED_SKINNY)[0]
    tiling = SkinnyTiling(*few.gate_up)
    quantized_skinny.gate_up_quantized(x, gate_up, experts, tiling, Gate.SILU, rounding=rounding, norm=norm)
    tiling = SkinnyTiling(*few.down)
    quantized_skinny.down_quantized(inner, down, experts, tiling, rounding=rounding, scale=scale)
    given, scales = round_rows.round_rows(x, rounding) if rounding.kind else (x, None)
    for config in (some[0] for some in QUANTIZED_GROUPED.values()):
        mapped, tiling = map_experts.map_experts(experts, 2, config.tile), GroupedTiling(*config.gate_up)
        quantized_grouped.grouped_quantized(
            given, gate_up, mapped, 8, tiling, x.dtype, x_scales=scales, gate=Gate.SILU
        )
"""
KERNELS = {
    "route_experts_kernel",
    "gate_up_skinny_kernel",
    "down_skinny_kernel",
    "map_experts_kernel",
    "grouped_linear_kernel",
    "combine_experts_kernel",
}


QUANTIZED_KERNELS = {
    "gate_up_quantized_kernel",
    "down_quantized_kernel",
    "round_rows_kernel",
    "map_experts_kernel",
    "grouped_quantized_kernel",
}


def test_kernels_of_quantized_weights_compile_for_an_h100(tmp_path: Path) -> None:
    found = shared_bytes(QUANTIZED, tmp_path)
    assert {name for name, _ in found} == QUANTIZED_KERNELS and max(size for _, size in found) <= SHARED, found


def test_kernels_of_few_rows_compile_for_an_h100(tmp_path: Path) -> None:
    found = shared_bytes(LAUNCHES, tmp_path)
    assert {name for name, _ in found} == KERNELS and max(size for _, size in found) <= SHARED, found
