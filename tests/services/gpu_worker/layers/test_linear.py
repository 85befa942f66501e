"""Every weight layout gives the same product, and the picker chooses by measured times."""

import pytest
import torch

from blockyard.services.gpu_worker.layers.linear import GROUP, Linear, dense_linear, in_groups
from blockyard.services.gpu_worker.quantization.dense import second_copy
from blockyard.services.gpu_worker.quantization.method import Fusion
from blockyard.services.gpu_worker.startup.cpu import CpuBackend
from blockyard.services.gpu_worker.startup.start_report import StartReport
from blockyard.shared.config.services.process import BusConfig, ProcessConfig
from blockyard.shared.config.services.worker import WorkerConfig


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inner", "outer"), [(64, 48), (256, 300), (600, 300), (1300, 1200), (1, 5)])
def test_all_layouts(dtype: torch.dtype, bias: bool, inner: int, outer: int) -> None:
    weight = torch.randn(outer, inner).to(dtype)
    vector = torch.randn(outer).to(dtype) if bias else None
    linear = dense_linear(weight.clone(), vector)
    linear.prepare()
    for rows in (1, 2, 16, 17, 40):
        x = torch.randn(rows, inner).to(dtype)
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if vector is None else vector.double())
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
        torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=tolerance * inner**0.5)


@pytest.mark.parametrize(
    ("inner", "outer", "dtype", "expected"),
    [
        (256, 4096, torch.float32, (True, 1)),
        (1024, 256, torch.float32, (False, 1)),
        (256, 256, torch.float32, (True, 16)),
        (64, 6, torch.float32, (False, 16)),
        (2048, 2048, torch.float32, (False, 0)),
        (256, 4096, torch.bfloat16, (False, 0)),
    ],
)
def test_picker(inner: int, outer: int, dtype: torch.dtype, expected: tuple[bool, int]) -> None:
    assert second_copy(inner, outer, dtype) == expected


def test_no_copy_is_left_behind() -> None:
    large = dense_linear(torch.randn(1300, 1200))
    large.prepare()
    assert large.method.tensors() == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("inner", "outer"), [(64, 48), (256, 300), (1024, 256), (1300, 1200), (1, 5), (64, 6), (2048, 9)]
)
def test_frozen_rows_do_not_depend_on_the_others(inner: int, outer: int, dtype: torch.dtype) -> None:
    linear = dense_linear(torch.randn(outer, inner).to(dtype), torch.randn(outer).to(dtype))
    linear.prepare()
    linear.make_batch_invariant()
    x = torch.randn(150, inner).to(dtype)
    together = linear(x)
    for rows in (1, 2, 5, 15, 16, 17, 64):
        for start in (0, 3, 16, 77):
            assert torch.equal(linear(x[start : start + rows]), together[start : start + rows])
    assert linear(x[:0]).shape == (0, outer)


def test_in_groups_calls_the_product_with_one_shape_only() -> None:
    seen = set()

    def product(x: torch.Tensor) -> torch.Tensor:
        seen.add(x.shape[0])
        return x

    x = torch.randn(40, 3)
    for rows in (0, 1, 16, 40):
        assert torch.equal(in_groups(product)(x[:rows]), x[:rows])
    assert seen == {GROUP}


def test_the_number_of_rows_selects_the_product() -> None:
    """The product for this number of rows is used, else the default one, else the plain product."""
    linear = dense_linear(torch.ones(2, 3))
    x = torch.ones(2, 3)
    linear.use({2: lambda x: x[:, :2] * 7})
    assert torch.equal(linear(x), torch.full((2, 2), 7.0))
    assert torch.equal(linear(x[:1]), torch.full((1, 2), 3.0))
    linear.use({}, lambda x: x[:, :2] * 9)
    assert torch.equal(linear(x), torch.full((2, 2), 9.0))


def test_what_is_added_to_a_product_is_added_by_kernels_that_are_installed_later_too() -> None:
    """As the rows of an adapter are. No fused kernel could add them."""
    linear = dense_linear(torch.ones(2, 3), fusion=Fusion.NORM)
    assert linear.fusion is Fusion.NORM
    linear.wrap(lambda product: lambda x: product(x) + 1)
    x = torch.ones(2, 3)
    assert torch.equal(linear(x), torch.full((2, 2), 4.0))
    linear.use({2: lambda x: x[:, :2] * 7}, lambda x: x[:, :2] * 9, fused={2: linear.method.apply})
    assert torch.equal(linear(x), torch.full((2, 2), 8.0))
    assert torch.equal(linear(x[:1]), torch.full((1, 2), 10.0))
    linear.ask_fusion(Fusion.NORM)
    assert (linear.fusion, linear.fused(2)) == (Fusion.NONE, None)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_every_linear_layer_is_made_batch_invariant(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    linears = [dense_linear(torch.ones(2, 3)) for _ in range(3)]
    frozen: list[Linear] = []

    def make_batch_invariant(self: Linear) -> None:
        frozen.append(self)

    monkeypatch.setattr(Linear, "make_batch_invariant", make_batch_invariant)

    class Model:
        def linears(self) -> list[Linear]:
            return linears

    process = ProcessConfig(name="one", bus=BusConfig(registry="ipc:///unused", bind="ipc:///unused"))
    config = WorkerConfig(process=process, model_path="unused", batch_invariant=batch_invariant)
    CpuBackend().pick_products(Model(), config, False, StartReport(print))  # type: ignore[arg-type]
    assert frozen == (linears if batch_invariant else [])
