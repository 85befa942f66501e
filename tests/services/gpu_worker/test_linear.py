"""Every layout gives the product, and the picker chooses as was measured."""

import pytest
import torch

from blockyard.services.gpu_worker.linear import Linear, second_copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inner", "outer"), [(64, 48), (256, 300), (600, 300), (1300, 1200), (1, 5)])
def test_all_layouts(dtype: torch.dtype, bias: bool, inner: int, outer: int) -> None:
    weight = torch.randn(outer, inner).to(dtype)
    vector = torch.randn(outer).to(dtype) if bias else None
    linear = Linear(weight.clone(), vector)
    linear.prepare()
    for rows in (1, 2, 16, 17, 40):
        x = torch.randn(rows, inner).to(dtype)
        residual = torch.randn(rows, outer).to(dtype)
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if vector is None else vector.double())
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
        torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=tolerance * inner**0.5)
        got = linear.add_to(residual.clone(), x).double()
        torch.testing.assert_close(got, expected + residual.double(), rtol=tolerance, atol=tolerance * inner**0.5)


@pytest.mark.parametrize(
    ("inner", "outer", "dtype", "expected"),
    [
        (256, 4096, torch.float32, (True, 1)),
        (1024, 256, torch.float32, (False, 1)),
        (256, 256, torch.float32, (True, 16)),
        (2048, 2048, torch.float32, (False, 0)),
        (256, 4096, torch.bfloat16, (False, 0)),
    ],
)
def test_picker(inner: int, outer: int, dtype: torch.dtype, expected: tuple[bool, int]) -> None:
    assert second_copy(inner, outer, dtype) == expected


def test_no_copy_is_left_behind() -> None:
    large = Linear(torch.randn(1300, 1200))
    large.prepare()
    assert large.weight is None
