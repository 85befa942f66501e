"""Kernels of weights and inputs of 8 bits are compiled for an H100, with and without a workspace."""

from pathlib import Path

from compile_for_hopper import SHARED, shared_bytes

LAUNCHES = """
from blockyard.kernels.layers import act_mul, add_rms_norm
from blockyard.kernels.layers.linear_stream_k import Tiling, Workspace
from blockyard.kernels.layers.rounding import E4M3, InputRounding
from blockyard.kernels.quantized import quantize_rows
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.quantized.linear_w8a8_rounding import linear_w8a8_rounding
from blockyard.kernels.quantized.linear_w8a8_skinny import linear_w8a8_skinny
from blockyard.kernels.quantized.linear_w8a8_stream_k import linear_w8a8_stream_k
from blockyard.kernels.quantized.operands import Weight8Bit

for file in (act_mul, add_rms_norm, quantize_rows):
    file.supports_pdl = lambda device: True
x, gate_up, norm = torch.zeros(8, 1024).bfloat16(), torch.zeros(8, 2048).bfloat16(), torch.zeros(1024).bfloat16()
space, tiling = Workspace(64 * 16 * 64, 64, torch.device("cpu")), Tiling(64, 16, 128, 4, 4, pdl=True, fetch=4)
for dtype, group, block in ((E4M3, None, 1), (E4M3, 128, 1), (E4M3, 128, 128), (torch.int8, None, 1)):
    rounding, groups = InputRounding(dtype, group), () if group is None else (8,)
    rows = quantize_rows.quantize_rows(x, rounding)
    act_mul.act_mul_rounded(gate_up, "silu", rounding)
    add_rms_norm.add_rms_norm_rounded(x, None, norm, 1e-5, rounding)
    weight = Weight8Bit(torch.zeros(256, 1024).to(dtype), torch.zeros(256 // block, *groups), group, block)
    linear_w8a8_skinny(rows, weight, None, out_tile=4, tile=1024, warps=4, pdl=True)
    around = {"norm": RMSNorm(norm, 1e-5), "add_to": torch.zeros(2, 256).bfloat16()}
    linear_w8a8_rounding(x[:2], rounding, weight, None, out_tile=8, warps=4, pdl=True, **around)
    linear_w8a8_stream_k(rows, weight, None, tiling)
    linear_w8a8_stream_k(rows, weight, None, tiling, space, 2)
"""
KERNELS = {
    "quantize_rows_kernel",
    "act_mul_rounded_kernel",
    "add_rms_norm_kernel",
    "linear_w8a8_rounding_kernel",
    "linear_w8a8_skinny_kernel",
    "linear_w8a8_stream_k_kernel",
}


def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    found = shared_bytes(LAUNCHES, tmp_path)
    assert {name for name, _ in found} == KERNELS and max(size for _, size in found) <= SHARED, found
