"""Tuned and batch-invariant layers with weights and inputs of 8 bits on a GPU, against float64 of rounded numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blockyard.kernels.quantized.quantize_rows import quantize_rows
from blockyard.services.gpu_worker.layers.linear import Linear, make_spec
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.quantization.kept.form import KeptForm, KeptLinear, kinds
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import Fp8W8A8
from blockyard.services.gpu_worker.quantization.kept.int8_w8a8 import Int8W8A8
from blockyard.services.gpu_worker.quantization.kept.w8a8_products import has_library
from blockyard.services.gpu_worker.quantization.method import Fusion

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

FORMS: list[KeptForm] = [Fp8W8A8(), Fp8W8A8(128), Fp8W8A8(static=True), Int8W8A8(), Int8W8A8(symmetric=False)]
SHAPES = [(384, 256), (256, 576), (256, 4096)]  # out, in; the last one sums as many inputs as `FAST_INPUTS`
ROWS = (1, 4, 17, 64, 200)


def layers(form: KeptForm) -> list[Linear]:
    made = []
    for outputs, inputs in SHAPES:
        kept = {
            name: torch.zeros(shape, dtype=dtype, device="cuda")
            for name, (shape, dtype) in kinds(form, outputs, inputs).items()
        }
        form.fill(kept, torch.Generator("cuda").manual_seed(1))
        if inputs == 576:
            kept["scales"][5] *= 2  # no longer the same for a block of outputs
        spec = make_spec([part("", outputs)], inputs)
        made.append(Linear(KeptLinear(form, kept, (inputs, outputs), torch.bfloat16), spec, Fusion.ADD))
        made[-1].prepare()
    return made


def tuner_of(linears: list[Linear]) -> Any:
    from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner

    return Tuner(linears, device=torch.device("cuda"), dtype=torch.bfloat16)


def wanted(linear: Linear, x: Tensor) -> Tensor:
    method = linear.method
    assert isinstance(method, KeptLinear)
    weight = method.kept_form.dequantize(method.tensors(), x.shape[1], torch.float32).double()
    return method.kept_form.round_inputs(x.float(), method.tensors()).double() @ weight.T


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_default_and_tuned_products(form: KeptForm, tmp_path: Path) -> None:
    linears = layers(form)
    with torch.inference_mode():
        inputs = [[torch.randn(rows, one.shape[0], device="cuda").bfloat16() for rows in ROWS] for one in linears]
        for linear, some in zip(linears, inputs, strict=True):
            for x in some:
                assert error(linear(x), wanted(linear, x)) < 6e-3
        tuner_of(linears).tune(list(ROWS), lambda share: None, tmp_path)
        for linear, some in zip(linears, inputs, strict=True):
            for x in some:
                assert error(linear(x), wanted(linear, x)) < 6e-3
                fused = linear.fused(len(x))
                if fused is not None:
                    total = torch.ones(len(x), linear.shape[1], device="cuda").bfloat16()
                    assert error(fused(x, add_to=total), wanted(linear, x) + 1) < 1e-2


@pytest.mark.parametrize("form", FORMS[:4], ids=str)
def test_every_candidate(form: KeptForm) -> None:
    linears = layers(form)
    tuner = tuner_of(linears)
    with torch.inference_mode():
        for rows in ROWS:
            tuner.compile([rows])
            for layer, group in zip(tuner.layers, tuner.groups, strict=True):
                x = torch.randn(rows, group[0].shape[0], device="cuda").bfloat16()
                for config in tuner.candidates(layer, rows):
                    assert error(tuner.products.of(config, group[0])(x), wanted(group[0], x)) < 6e-3, config
                    if config.rounds:
                        fused, total = tuner.products.fused(config, group[0]), torch.zeros_like(group[0](x))
                        assert error(fused(x, add_to=total), wanted(group[0], x)) < 6e-3, config


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_do_not_depend_on_the_others(form: KeptForm) -> None:
    linears = layers(form)
    tuner_of(linears).make_batch_invariant()
    with torch.inference_mode():
        for linear in linears:
            x = torch.randn(300, linear.shape[0], device="cuda").bfloat16()
            together = linear(x)
            for rows in (1, 2, 16, 63, 128):
                for start in (0, 37):
                    assert torch.equal(linear(x[start : start + rows]), together[start : start + rows])


def test_blocks_are_multiplied_by_the_library_where_scales_are_of_blocks() -> None:
    """Where CUDA has such products, from 12.9 on; the others have their own kernel."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no H100")
    whole, cut = layers(Fp8W8A8(128))[2], layers(Fp8W8A8(128))[1]
    for linear, is_library in ((whole, True), (cut, False)):
        assert isinstance(linear.method, KeptLinear)
        assert linear.rounding is not None
        for rows in (1, 5, 64, 1001):
            x = torch.randn(rows, linear.shape[0], device="cuda").bfloat16()
            assert has_library(quantize_rows(x, linear.rounding), linear.method.weight8()) == is_library
            assert error(linear(x), wanted(linear, x)) < 6e-3
