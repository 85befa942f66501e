"""Weights and inputs in int8 against their definition, number by number."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockyard.services.gpu_worker.quantization.kept import form as forms
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear, kinds
from blockyard.services.gpu_worker.quantization.kept.int8_w8a8 import Int8W8A8

FORMS = [Int8W8A8(static, symmetric) for static in (False, True) for symmetric in (False, True)]
SCALE, ZERO = 0.03, -17  # of static inputs


def draw(form: Int8W8A8, outputs: int, inputs: int) -> dict[str, Tensor]:
    made = {
        "codes": torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8),
        "scales": torch.rand(outputs) * 0.01,
    }
    if form.static and form.symmetric:
        made["input_scale"] = torch.tensor(SCALE)
    elif form.static:
        made |= {"input_high": torch.tensor((127 - ZERO) * SCALE), "input_low": torch.tensor((128 + ZERO) * SCALE)}
    return made


def rounded(form: Int8W8A8, row: list[float]) -> list[float]:
    low, high = min(*row, 0.0), max(*row, 0.0)
    scale, zero = SCALE, 0 if form.symmetric else ZERO
    if not form.static and form.symmetric:
        scale = max(-low, high) / 127
    elif not form.static:
        scale = (high - low) / 255
        zero = round(-128 - low / scale) if scale else 0
    return [(min(max(round(one / scale + zero), -128), 127) - zero) * scale if scale else 0.0 for one in row]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 64), (5, 71)])
def test_every_number(form: Int8W8A8, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    kept = draw(form, outputs, inputs)
    assert {name: (tuple(one.shape), one.dtype) for name, one in kept.items()} == kinds(form, outputs, inputs)
    want = torch.tensor(
        [[code * float(kept["scales"][row]) for code in some] for row, some in enumerate(kept["codes"].tolist())]
    )
    torch.testing.assert_close(form.dequantize(kept, inputs, torch.float32), want)
    x, bias = torch.randn(6, inputs) * 2, torch.randn(outputs)
    x[2], x[3] = 0, x[3].abs()
    x[4] *= 1e4
    seen = torch.tensor([rounded(form, row) for row in x.tolist()])
    torch.testing.assert_close(form.round_inputs(x, kept), seen)
    for is_dequantized in (False, True):
        monkeypatch.setattr(forms, "is_dequantized_on", lambda device, kept, here=is_dequantized: here)
        linear = KeptLinear(form, kept, (inputs, outputs), torch.float32, bias)
        linear.prepare()
        torch.testing.assert_close(linear.apply(x), F.linear(seen, want, bias), atol=1e-3, rtol=1e-4)
        for row in range(len(x)):
            alone = linear.apply(x[row : row + 1])[0]
            torch.testing.assert_close(alone, linear.apply(x)[row], atol=1e-3, rtol=1e-5)


def test_products_on_the_host_are_those_of_integers() -> None:
    """A row alone has the same bits as among others, in bfloat16, too."""
    form = Int8W8A8()
    kept = draw(form, 48, 96)
    x = torch.randn(9, 96).bfloat16()
    whole = form.product(x, kept)
    assert form.multiplies_on_host
    assert whole is not None
    assert whole.dtype == torch.bfloat16
    for row in range(9):
        alone = form.product(x[row : row + 1], kept)
        assert alone is not None
        assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("form", FORMS)
def test_dummy_weights(form: Int8W8A8) -> None:
    kept = draw(form, 64, 256)
    form.fill(kept, torch.Generator().manual_seed(1))
    assert 0.019 < float(form.dequantize(kept, 256, torch.float32).std()) < 0.021
    assert torch.isfinite(form.round_inputs(torch.randn(3, 256), kept)).all()
