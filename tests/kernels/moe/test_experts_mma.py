"""Products of experts whose codes of 4 bits stay in registers, against float64: what is compiled for an H100 is run on
the CPU, because Gluon has no interpreter, and more cases on a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compile_for_hopper import shared_bytes
from packed_experts import FORMS, draw
from ptx.experts_mma_cases import GROUPED, SUMS, Case, check_grouped, check_sums

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.moe.four_bits import grouped_mma as grouped_file
from blockyard.kernels.moe.four_bits import row_sums as sums_file
from blockyard.kernels.moe.four_bits.grouped_mma import grouped_mma
from blockyard.kernels.moe.four_bits.mma_form import MmaTiling, mma_form
from blockyard.kernels.moe.four_bits.row_sums import row_sums
from blockyard.kernels.moe.gates import Gate
from blockyard.kernels.quantized.packed_weights import Codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
FOUR_BITS = [
    name for name in FORMS if FORMS[name][0] <= Codes.TABLE4 and name not in ("int4 g48", "int4 g32 float zeros")
]
NOT_IN_FLOAT16 = ("mxfp4", "nf4 g64", "int4 g64 uint8 zeros")  # their scales are no numbers of float16
EMULATED = """
import torch
from ptx.launches import emulate_launches
from ptx.experts_mma_cases import {cases}, {check}
from blockyard.kernels.moe.four_bits import mma_form

emulate_launches()
mma_form.supports_pdl = lambda device: True
torch.manual_seed(1)
for case in {cases}:
    {check}(case, "cpu")
"""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch, nan_torch: object) -> None:
    """New tensors are found if they are not written."""
    for file in (grouped_file, sums_file):
        monkeypatch.setattr(file, "torch", nan_torch)
    torch.manual_seed(1)


def test_tiles_of_pairs_as_compiled_for_an_h100(tmp_path: Path) -> None:
    assert len(shared_bytes(EMULATED.format(cases="GROUPED", check="check_grouped"), tmp_path)) == len(GROUPED)


def test_sums_of_rows_as_compiled_for_an_h100(tmp_path: Path) -> None:
    assert len(shared_bytes(EMULATED.format(cases="SUMS", check="check_sums"), tmp_path)) == len(SUMS)


@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FOUR_BITS)
def test_every_form(form: str, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and form in NOT_IN_FLOAT16:
        assert mma_form(draw(form, 2, 16, 256, DEVICE), dtype) is None
        return
    for case in GROUPED:
        normed = case.normed and dtype == torch.bfloat16  # others are refused, see below
        check_grouped(replace(case, form=form, dtype=dtype, normed=normed), DEVICE)
    for case in SUMS:
        check_sums(replace(case, form=form, dtype=dtype), DEVICE)


@on_gpu
@pytest.mark.parametrize(
    "tiling", [MmaTiling(32, 8, 2), MmaTiling(64, 4, 1), MmaTiling(32, 2, 1), MmaTiling(16, 16, 1)]
)
def test_sizes_of_gpt_oss(tiling: MmaTiling) -> None:
    one = Case(form="mxfp4", rows=1, inputs=2880, outs=5760, tiling=tiling, gate=Gate.CLAMPED_SWIGLU)
    for case in (one, replace(one, rows=9), replace(one, rows=64, tile=16)):
        check_grouped(case, DEVICE)
    for rows in (1, 2):
        check_sums(replace(one, rows=rows, outs=2880), DEVICE)


@on_gpu
def test_a_pair_does_not_depend_on_the_others() -> None:
    weights = draw("mxfp4", 4, 64, 416, DEVICE)
    form, tiling = mma_form(weights, torch.bfloat16), MmaTiling(32, 4, 1)
    assert form is not None
    x = torch.randn(16, 416, device=DEVICE).bfloat16()
    experts = torch.tensor([[2, 1]], device=DEVICE).int().repeat(16, 1)
    together = grouped_mma(x, weights, form, experts, 32, tiling, gate=Gate.SILU)
    for row in (0, 7, 15):
        alone = grouped_mma(x[row : row + 1], weights, form, experts[:1], 2, tiling, gate=Gate.SILU)
        assert torch.equal(alone, together[2 * row : 2 * row + 2])


def test_what_does_not_fit_is_refused() -> None:
    weights, x = draw("int4 g128", 2, 32, 256, "cpu"), torch.zeros(1, 256).bfloat16()
    form, experts = mma_form(weights, x.dtype), torch.zeros(1, 2).int()
    assert form is not None
    with pytest.raises(ValueError, match="of 256 inputs"):
        grouped_mma(x[:, :128].contiguous(), weights, form, experts, 2, MmaTiling(16, 4, 1))
    norm = RMSNorm(torch.ones(256), 1e-6)
    with pytest.raises(ValueError, match=r"4 rows of torch\.bfloat16 are not normalised"):
        grouped_mma(x.repeat(4, 1), weights, form, experts.repeat(4, 1), 8, MmaTiling(16, 4, 1), norm=norm)
    with pytest.raises(ValueError, match=r"1 rows of torch\.float16 are not normalised"):
        grouped_mma(x.half(), weights, form, experts, 2, MmaTiling(16, 4, 1), norm=norm)
    with pytest.raises(ValueError, match="do not fit 3 pairs"):
        row_sums(torch.zeros(3, 256).bfloat16(), weights, form, experts, MmaTiling(16, 4, 1))
    for name, inputs in (("int4 g128", 264), ("int4 g48", 288), ("int4 g32 float zeros", 256), ("int8 rows", 256)):
        assert mma_form(draw(name, 2, 32, inputs, "cpu"), x.dtype) is None
    assert (
        mma_form(weights, torch.float32) is None and mma_form(draw("mxfp4", 2, 32, 256, "cpu"), torch.float16) is None
    )
