"""Decodes over 8-bit KV in Gluon against float64: what is compiled for an H100 is run on the CPU, and more on a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compile_for_hopper import shared_bytes
from ptx.decode_fp8_cases import CASES, Case, check_case

from blockyard.kernels.attention.paged_decode_fp8 import fits_decode_fp8

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
EMULATED = """
import torch
from ptx.launches import emulate_launches
from ptx.decode_fp8_cases import CASES, check_case

emulate_launches()
torch.manual_seed(1)
for case in CASES:
    check_case(case, "cpu")
"""


def test_decodes_as_compiled_for_an_h100(tmp_path: Path) -> None:
    names = [name for name, _size in shared_bytes(EMULATED, tmp_path)]
    assert names.count("paged_decode_fp8_kernel") == len(CASES)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("in_kernel", [False, True])
def test_both_kinds_of_numbers(dtype: torch.dtype, kv_dtype: torch.dtype, in_kernel: bool) -> None:
    torch.manual_seed(1)
    case = Case((700, 0, 1, 64, 129), dtype=dtype, kv_dtype=kv_dtype, in_kernel=in_kernel)
    for heads, kv_heads in ((8, 1), (4, 2), (10, 2), (3, 3), (16, 1), (22, 2)):
        for block_size in (8, 16, 64):
            for head_dim in (64, 128):
                one = replace(case, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
                check_case(one, "cuda")
                check_case(replace(one, window=77, has_sinks=True, soft_cap=3.0), "cuda")


def test_only_a_hopper_gpu_runs_the_kernel() -> None:
    layer = torch.zeros(1, 2, 2, 16, 128).to(torch.float8_e4m3fn)
    assert not fits_decode_fp8(torch.zeros(1, 4, 128).bfloat16(), layer)
