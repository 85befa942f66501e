"""Tuned and batch-invariant linear layers on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from blockyard.services.gpu_worker.layers.linear import Linear, dense_linear

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

SHAPES = [(384, 256), (256, 384), (1024, 256)]  # out, in


def tuner_of(linears: list[Linear]) -> Any:
    from blockyard.services.gpu_worker.linear_tuning.tuner import Tuner

    return Tuner(linears, device=torch.device("cuda"), dtype=torch.bfloat16)


def layers(bias: bool = False) -> list[Linear]:
    return [
        dense_linear(
            torch.randn(*shape, device="cuda", dtype=torch.bfloat16),
            torch.randn(shape[0], device="cuda", dtype=torch.bfloat16) if bias else None,
        )
        for shape in SHAPES * 2
    ]


def rows_of(linear: Linear, rows: int) -> torch.Tensor:
    return torch.randn(rows, linear.shape[0], device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("bias", [True, False])
def test_tuned_products_are_right_and_measured_once(bias: bool, tmp_path: Path) -> None:
    linears, path = layers(bias), tmp_path
    reports: list[float] = []
    assert "measured 3 of 3" in tuner_of(linears).tune([1, 4, 40], reports.append, path)
    assert len(reports) == 4
    assert "as measured before" in tuner_of(linears).tune([1, 4, 40], reports.append, path)
    assert "measured 1 of 2" in tuner_of(linears).tune([1, 8], reports.append, path)
    with torch.inference_mode():
        for linear in linears:
            for rows in (1, 4, 8, 33, 40):
                x = rows_of(linear, rows)
                want = x.double() @ linear.method.weight.double().T
                bias_vector = linear.method.bias
                want = want if bias_vector is None else want + bias_vector.double()
                assert float((linear(x).double() - want).norm() / want.norm()) < 6e-3


def test_every_candidate_is_right(tmp_path: Path) -> None:
    """Also in a chain where each kernel starts before the previous one has ended."""
    linears = layers()
    tuner = tuner_of(linears)
    sizes = (1, 2, 4, 16, 20, 64, 128, 256)
    tuner.compile(sizes)
    with torch.inference_mode():
        for rows in sizes:
            for layer, group in zip(tuner.layers, tuner.groups, strict=True):
                x = rows_of(group[0], rows)
                wants = [x.double() @ linear.method.weight.double().T for linear in group]
                for config in tuner.candidates(layer, rows):
                    products = [tuner.products.of(config, linear) for linear in group * 2]
                    for got, want in zip([product(x) for product in products], wants * 2, strict=True):
                        assert float((got.double() - want).norm() / want.norm()) < 6e-3, config


def test_frozen_rows_do_not_depend_on_the_others() -> None:
    linears = layers(bias=True)
    tuner_of(linears).make_batch_invariant()
    with torch.inference_mode():
        for linear in linears:
            x = rows_of(linear, 700)
            together = linear(x)
            for rows in (1, 2, 16, 63, 64, 128, 129, 500):
                for start in (0, 1, 37, 200):
                    assert torch.equal(linear(x[start : start + rows]), together[start : start + rows])
