"""Kernels of one or two rows that round their inputs themselves: which layers have them, and what they compute."""

import msgspec
import pytest
import torch

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.linear import Linear, make_spec
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import KernelConfig, LinearShape
from blockyard.services.gpu_worker.linear_tuning.rounded_input_products import RoundedInputProducts
from blockyard.services.gpu_worker.loading.linear_spec import part
from blockyard.services.gpu_worker.quantization.kept import fp8_w8a8
from blockyard.services.gpu_worker.quantization.kept.form import KeptLinear, kinds
from blockyard.services.gpu_worker.quantization.kept.fp8_w8a8 import Fp8W8A8
from blockyard.services.gpu_worker.quantization.method import Fusion

HAS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if HAS_GPU else ("cpu", torch.float16)
INPUTS, OUTPUTS = 1040, 24


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU they run in the interpreter."""
    monkeypatch.setattr(fp8_w8a8, "has_kernels", lambda codes: True)
    monkeypatch.setattr(fp8_w8a8, "has_products", lambda device: True)


def layer(fusion: Fusion) -> Linear:
    form = Fp8W8A8()
    kept = {
        name: torch.zeros(shape, dtype=dtype, device=DEVICE)
        for name, (shape, dtype) in kinds(form, OUTPUTS, INPUTS).items()
    }
    form.fill(kept, torch.Generator(DEVICE).manual_seed(1))
    return Linear(KeptLinear(form, kept, (INPUTS, OUTPUTS), DTYPE), make_spec([part("", OUTPUTS)], INPUTS), fusion)


def rounding(linear: Linear, rows: int) -> list[KernelConfig]:
    """Candidates that round."""
    made = RoundedInputProducts(torch.device(DEVICE), DTYPE, 132)
    found = made.candidates(LinearShape(*linear.shape, 1), rows, [linear])
    assert any(not one.rounds for one in found), "both are measured"
    return [one for one in found if one.rounds]


def test_what_has_kernels_that_round() -> None:
    for fusion in (Fusion.NORM, Fusion.ADD):
        assert rounding(layer(fusion), 1)
        assert rounding(layer(fusion), 2)
        assert not rounding(layer(fusion), 4)
    for fusion in (Fusion.NONE, Fusion.GATED_ADD):
        assert not rounding(layer(fusion), 1)


def test_each_computes_what_separate_kernels_do() -> None:
    made, linear = RoundedInputProducts(torch.device(DEVICE), DTYPE, 132), layer(Fusion.NORM)
    norm = RMSNorm(torch.rand(INPUTS, device=DEVICE).to(DTYPE), 1e-6)
    for rows in (1, 2):
        x, gate_up, total = (torch.randn(rows, size, device=DEVICE).to(DTYPE) for size in (INPUTS, 2 * INPUTS, OUTPUTS))
        for config in rounding(linear, rows):
            own = made.fused(config, linear.method)
            separate = made.fused(msgspec.structs.replace(config, rounds=False), linear.method)
            for got, want in (
                (own(x, norm), separate(x, norm)),
                (own(x, add_to=total.clone()), separate(x, add_to=total.clone())),
                (own(gate_up, gated=True, add_to=total.clone()), separate(gate_up, gated=True, add_to=total.clone())),
            ):
                assert torch.equal(got, want) or HAS_GPU
                torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_the_example_of_a_kernel_has_its_tile() -> None:
    made, linear = RoundedInputProducts(torch.device(DEVICE), DTYPE, 132), layer(Fusion.ADD)
    config = rounding(linear, 1)[0]
    assert config.in_tile == 2048
    assert made.example(config, False, Fusion.ADD, linear.method).shape[0] == config.in_tile
