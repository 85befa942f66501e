"""Products of rows in 8 bits by torch: what `torch._scaled_mm` is given, checked by its rules of scales."""

from typing import Any

import pytest
import torch
from torch import Tensor

from blockyard.kernels.layers.round_row import allocate
from blockyard.kernels.layers.rounding import E4M3, InputRounding, RoundedRows, round_rows_reference
from blockyard.kernels.quantized.operands import Weight8Bit, linear_w8a8_reference
from blockyard.services.gpu_worker.quantization.kept import w8a8_products
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import Fp8W8A8


def scaled_mm(codes: Tensor, weight: Tensor, *, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype,
              use_fast_accum: bool = False) -> Tensor:  # fmt: skip
    """With scales of 1 x 128 and 128 x 128, as torch documents them in the error of `get_joint_scaling`."""
    (rows, size), outs = codes.shape, weight.shape[1]
    groups = -(-size // 128)
    assert codes.is_contiguous() and weight.t().is_contiguous() and rows % 4 == 0 and not use_fast_accum
    assert scale_a.shape == (rows, groups) and scale_a.stride() == (1, rows)
    assert scale_b.shape == (groups, -(-outs // 128)) and scale_b.stride() == (1, groups) and groups % 4 == 0
    x = RoundedRows(codes, scale_a, out_dtype)
    return linear_w8a8_reference(x, Weight8Bit(weight.t(), scale_b.t(), 128, 128)).to(out_dtype)


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_blocks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    rounding = InputRounding(E4M3, 128)
    plain = round_rows_reference(torch.randn(rows, 512), rounding)
    given = allocate(rows, 512, rounding, torch.empty(0).bfloat16())
    given.codes.copy_(plain.codes)
    given.scales.copy_(plain.scales)
    weight = Weight8Bit(torch.randn(144, 512).to(E4M3), torch.rand(2, 4), 128, 128)
    got = w8a8_products.by_library(given, weight)
    torch.testing.assert_close(got, linear_w8a8_reference(plain, weight).bfloat16())


def test_blocks_that_the_library_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("scaled_gemm with 1x128 blockwise scaling is only supported for CUDA 12.9 and above")

    def takes(outs: int, inputs: int, block: int = 128) -> bool:
        groups = inputs // 128
        rows = RoundedRows(torch.zeros(4, inputs).to(E4M3), torch.ones(groups, 4).t(), torch.bfloat16)
        weight = Weight8Bit(torch.zeros(outs, inputs).to(E4M3), torch.ones(-(-outs // block), groups), 128, block)
        return w8a8_products.has_library(rows, weight)

    capability = w8a8_products.SCALED_ROWS
    monkeypatch.setattr(w8a8_products, "compute_capability", lambda device: capability, raising=False)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    assert takes(272, 512)
    assert not takes(272, 512, block=1)  # scales of rows
    assert not takes(272, 640)  # 5 groups
    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert takes(272, 512), "it is asked once"
    assert not takes(528, 512)


@pytest.mark.parametrize("outputs", [1, 128, 200, 384])
def test_scales_of_whole_blocks_become_one_each(outputs: int) -> None:
    form, inputs = Fp8W8A8(128), 300
    blocks = torch.rand(-(-outputs // 128), 3)
    kept = {
        "codes": torch.randn(outputs, inputs).to(E4M3),
        "scales": blocks.repeat_interleave(128, 0)[:outputs].contiguous(),
    }
    compact = form.compact(kept)
    assert torch.equal(compact["scales"], blocks)
    assert torch.equal(form.dequantize(compact, inputs, torch.float32), form.dequantize(kept, inputs, torch.float32))
    assert form.weight(compact).block == (128 if outputs > 1 else 1)
    assert form.compact(compact)["scales"].shape == blocks.shape
    kept["scales"][-1, 1] += 1
    assert outputs == 1 or form.compact(kept)["scales"].shape == (outputs, 3)
