"""Weights kept in 4 bits against their definition, number by number."""

from dataclasses import replace

import pytest
import torch
from kept_checks import check_experts, check_numbers
from torch import Tensor

from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear, kinds
from blockyard.services.gpu_worker.quantization.kept.w4a16 import W4A16, pack, unpack
from blockyard.services.gpu_worker.quantization.kept.w8a16 import W8A16

FORMS = [
    W4A16(),
    W4A16(32, scales=torch.bfloat16),
    W4A16(32, zeros=torch.uint8),
    W4A16(16, zeros=torch.float16),
    W4A16(None, zeros=torch.float32, scales=torch.float32),
    W4A16(32, zeros=torch.uint8, order="a"),
    W4A16(order="a"),
]


def draw(form: W4A16, lead: tuple[int, ...], outputs: int, inputs: int) -> dict[str, Tensor]:
    made = {}
    for name, (shape, dtype) in kinds(form, outputs, inputs, lead).items():
        if name == "order":
            made[name] = torch.stack([torch.randperm(inputs) for _ in range(lead[0] if lead else 1)])
            made[name] = made[name].reshape(shape).to(dtype)
        elif name == "codes":
            made[name] = torch.randint(0, 256, shape, dtype=dtype)
        elif name == "zeros" and dtype == torch.uint8:
            made[name] = torch.randint(0, 17, shape, dtype=dtype)
        else:
            made[name] = (torch.rand(shape) * (16 if name == "zeros" else 0.05)).to(dtype)
    return made


def number(form: W4A16, kept: dict[str, Tensor], row: int, column: int, inputs: int) -> tuple[int, float]:
    """The input of a column, and the weight."""
    group = () if form.group is None else (column // form.group,)
    byte = int(kept["codes"][row, column // 2])
    code = byte >> 4 if column % 2 else byte & 15
    zero = 8.0 if form.zeros is None else float(kept["zeros"][(row, *group)])
    of_input = int(kept["order"][column]) if form.order else column
    return of_input, (code - zero) * float(kept["scales"][(row, *group)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("inputs", [64, 71])
def test_every_number(form: W4A16, inputs: int) -> None:
    torch.manual_seed(1)
    kept, want = draw(form, (), 5, inputs), torch.full((5, inputs), torch.nan)
    for row in range(5):
        for column in range(inputs):
            of_input, value = number(form, kept, row, column, inputs)
            want[row, of_input] = value
    check_numbers(form, kept, want)


@pytest.mark.parametrize("form", FORMS)
def test_experts(form: W4A16) -> None:
    check_experts(form, draw(form, (3,), 6, 66), inputs=66, outputs=6)


@pytest.mark.parametrize("form", FORMS)
def test_dummy_weights(form: W4A16) -> None:
    kept = draw(form, (), 64, 256)
    form.fill(kept, torch.Generator().manual_seed(1))
    assert 0.019 < float(form.dequantize(kept, 256, torch.float32).std()) < 0.021


@pytest.mark.parametrize("inputs", [1, 2, 7, 16])
def test_packing(inputs: int) -> None:
    codes = torch.randint(0, 16, (2, 3, inputs))
    packed = pack(codes)
    assert packed.shape == (2, 3, (inputs + 1) // 2)
    assert torch.equal(unpack(packed, inputs), codes.to(torch.uint8))


@pytest.mark.parametrize(
    "form", [W4A16(scales=torch.float32), *(W4A16(one, zeros=torch.uint8) for one in (32, 64, 128, 256))]
)
@pytest.mark.parametrize("order", ["", "a"])
@pytest.mark.parametrize("rows", [1, 3, 128, 129])
def test_products_of_the_cpu(form: W4A16, order: str, rows: int) -> None:
    """Against float64: scales, offsets and results are rounded to bfloat16."""
    form, inputs = replace(form, order=order), 512
    assert form.fits_host((inputs, 48), torch.bfloat16)
    kept = draw(form, (), 48, inputs)
    linear = KeptLinear(form, kept, (inputs, 48), torch.bfloat16, bias := torch.randn(48).bfloat16())
    linear.prepare()
    assert linear.size_bytes < 48 * inputs
    x = torch.randn(rows, inputs).bfloat16()
    numbers, got = form.dequantize(kept, inputs, torch.float64), linear.apply(x)
    assert got.dtype == torch.bfloat16
    want = x.double() @ numbers.t() + bias
    most = 2**-8 * (x.double().abs() @ numbers.abs().t() + bias.abs())
    assert ((got.double() - want).abs() < most).all()
    assert float((got.double() - want).std() / want.std()) < 0.01


@pytest.mark.parametrize("rows", [1, 5, 16, 17])
def test_products_of_8_bits_of_the_cpu(rows: int) -> None:
    codes, scales = torch.randint(-128, 128, (40, 192), dtype=torch.int8), (torch.rand(40) * 0.01).half()
    form, kept = W8A16(torch.int8, scales=torch.float16), {"codes": codes, "scales": scales}
    linear = KeptLinear(form, kept, (192, 40), torch.bfloat16)
    linear.prepare()
    assert linear.size_bytes == 40 * 192 + 2 * 40
    x = torch.randn(rows, 192).bfloat16()
    numbers, got = codes.double() * scales.double()[:, None], linear.apply(x)
    assert got.dtype == torch.bfloat16
    assert ((got.double() - x.double() @ numbers.t()).abs() < 2**-7 * (x.double().abs() @ numbers.abs().t())).all()
    for other in (
        W8A16(torch.uint8),
        W8A16(torch.int8, 8),
        W8A16(torch.int8, zeros=True),
        W8A16(torch.int8, order="a"),
    ):
        assert not other.fits_host((192, 40), torch.bfloat16)
    assert not form.fits_host((72, 40), torch.bfloat16)


@pytest.mark.parametrize(
    ("form", "shape", "dtype"),
    [
        (W4A16(16), (64, 16), torch.bfloat16),
        (W4A16(32), (48, 16), torch.bfloat16),
        (W4A16(32), (64, 24), torch.bfloat16),
        (W4A16(), (48, 16), torch.bfloat16),
        (W4A16(32), (64, 16), torch.float32),
    ],
)
def test_what_the_cpu_does_not_multiply_is_dequantized(form: W4A16, shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert not form.fits_host(shape, dtype)
    linear = KeptLinear(form, draw(form, (), *shape[::-1]), shape, dtype)
    linear.prepare()
    assert linear.size_bytes == shape[0] * shape[1] * dtype.itemsize
