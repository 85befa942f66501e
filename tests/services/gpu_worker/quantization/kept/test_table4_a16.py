"""Weights kept as codes of a table against their definition, number by number."""

import pytest
import torch
from kept_checks import check_experts, check_numbers
from torch import Tensor

from blockyard.services.gpu_worker.quantization.kept.form import kinds
from blockyard.services.gpu_worker.quantization.kept.table4_a16 import E2M1, FP4, NF4, Table4A16, to_table

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
FORMS = [
    Table4A16(NF4, 64),
    Table4A16(FP4, 64, scales=torch.float16),
    Table4A16(NF4, 32, scales=torch.bfloat16, row_scales=True),
    Table4A16(E2M1, 16, scales=E4M3, row_scales=True),
    Table4A16(E2M1, 32, scales=E8M0),
]


def draw(form: Table4A16, lead: tuple[int, ...], outputs: int, inputs: int) -> dict[str, Tensor]:
    made = {}
    for name, (shape, dtype) in kinds(form, outputs, inputs, lead).items():
        if name == "codes":
            made[name] = torch.randint(0, 256, shape, dtype=dtype)
        elif dtype == E8M0:
            made[name] = torch.randint(110, 130, shape, dtype=torch.uint8).view(dtype)
        else:
            made[name] = torch.rand(shape).to(dtype)
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inputs", [64, 71, 160])
def test_every_number(form: Table4A16, inputs: int) -> None:
    torch.manual_seed(1)
    kept, want = draw(form, (), 5, inputs), torch.full((5, inputs), torch.nan)
    for row in range(5):
        for column in range(inputs):
            byte = int(kept["codes"][row, column // 2])
            number = form.table[byte >> 4 if column % 2 else byte & 15]
            of_row = float(kept["row_scales"][row]) if form.row_scales else 1.0
            want[row, column] = number * float(kept["scales"].float()[row, column // form.group]) * of_row
    check_numbers(form, kept, want)


@pytest.mark.parametrize("form", FORMS)
def test_experts(form: Table4A16) -> None:
    check_experts(form, draw(form, (3,), 6, 66), inputs=66, outputs=6)


@pytest.mark.parametrize("form", FORMS)
def test_dummy_weights(form: Table4A16) -> None:
    kept = draw(form, (), 64, 256)
    form.fill(kept, torch.Generator().manual_seed(1))
    far = 1.42 if form.scales == E8M0 else 1.05
    assert 0.02 / far < float(form.dequantize(kept, 256, torch.float32).std()) < 0.02 * far


@pytest.mark.parametrize("table", [NF4, FP4])
@pytest.mark.parametrize("inputs", [64, 130])
def test_rounding_takes_the_nearest_number(table: tuple[float, ...], inputs: int) -> None:
    x = torch.randn(7, inputs)
    x[2] = 0
    codes, scales = to_table(x, table, 64)
    for row in range(7):
        for start in range(0, inputs, 64):
            part = x[row, start : start + 64]
            assert float(scales[row, start // 64]) == float(part.abs().max())
            distances = (part[:, None] - torch.tensor(table) * part.abs().max()).abs()
            got = distances.gather(1, codes[row, start : start + 64, None].long())[:, 0]
            torch.testing.assert_close(got, distances.amin(1), atol=1e-6, rtol=0)
