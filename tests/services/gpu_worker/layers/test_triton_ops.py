"""The operations between matrix products, as Triton kernels, against plain torch."""

from functools import partial
from typing import Any

import pytest
import torch
from placed_adapters import KERNELS

from blockyard.kernels.layers.linear_skinny import linear_skinny
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.kernels.lora.adapter_table import NO_OFFSET, AdapterTable
from blockyard.kernels.lora.add_adapters import start_adapters
from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.fused_ops import FusedOps, TorchOps
from blockyard.services.gpu_worker.layers.linear import Linear, dense_linear
from blockyard.services.gpu_worker.layers.norm import LayerNorm, Norm
from blockyard.services.gpu_worker.layers.triton_ops import TritonOps
from blockyard.services.gpu_worker.loading.weights import WeightTable
from blockyard.services.gpu_worker.lora.device.device_products import AdapterKernels, DeviceAdaptedRows
from blockyard.services.gpu_worker.quantization.method import Fusion

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def adapt(linear: Linear, places: list[int]) -> None:
    """Gives rows of a layer adapters of two places."""
    (inputs, outs), rows, ints = linear.shape, AdapterRows(), {"dtype": torch.int32, "device": DEVICE}
    arena, size = torch.randn(2 * 16 * (inputs + outs), device=DEVICE) / 8, 16 * (inputs + outs)
    offsets = torch.tensor([[[at, at + 16 * inputs, NO_OFFSET]] for at in (0, size)], device=DEVICE)
    ranks, sizes = torch.tensor([[16], [5]], **ints), torch.tensor([outs], **ints)
    table = AdapterTable(arena, offsets, ranks, torch.zeros(1, **ints), sizes, outs, 16)
    rows.begin(torch.tensor(places, **ints))
    linear.adapt(DeviceAdaptedRows(rows, table, AdapterKernels(start_adapters, *KERNELS[1:])))


@pytest.mark.parametrize("places", [None, [1, 0], [-1, 0]])
@pytest.mark.parametrize("is_fused", [False, True])
def test_fused_products(is_fused: bool, places: list[int] | None) -> None:
    """A layer's products, in separate kernels and fused with norm, gate and sum, against plain torch; with adapters of
    these places."""
    rows, hidden, inner = 2, 32, 48
    torch.manual_seed(3)
    shapes = {Fusion.NORM: (40, hidden), Fusion.ADD: (hidden, 40), Fusion.GATED_ADD: (hidden, inner)}
    linears = {
        fusion: dense_linear(torch.randn(*shape, device=DEVICE), fusion=fusion) for fusion, shape in shapes.items()
    }
    for linear in linears.values() if places is not None else ():
        adapt(linear, places)
    norm = RMSNorm(torch.randn(hidden, device=DEVICE), 1e-6)
    residual, delta = torch.randn(2, rows, hidden, device=DEVICE)
    gate_up = torch.randn(rows, 2 * inner, device=DEVICE)

    def run(ops: FusedOps) -> list[torch.Tensor]:
        total = residual + delta
        out = [
            ops.norm_then_linear(linears[Fusion.NORM], x, y, norm)
            for x, y in ((residual.clone(), delta), (total, None))
        ]
        for fusion, x, activation in ((Fusion.ADD, out[1].clone(), None), (Fusion.GATED_ADD, gate_up.clone(), "silu")):
            left = ops.linear_then_add(linears[fusion], x, total, activation)
            assert (left is None) == (is_fused and isinstance(ops, TritonOps))
            out.append(total.clone() if left is None else total.add_(left).clone())
        return out

    want = run(TorchOps())
    calls = []
    if is_fused:
        for linear in linears.values():
            tiles = {"out_tile": 4, "tile": 32, "warps": 1, "pdl": False}
            product = partial(linear_skinny, weight=linear.method.weight, bias=None, **tiles)

            def fused(x: torch.Tensor, product: Any = product, **around: Any) -> torch.Tensor:
                calls.append(around)
                return product(x, **around)

            linear.use({}, fused={rows: fused})
    for got, one in zip(run(TritonOps()), want, strict=True):
        torch.testing.assert_close(got, one, atol=1e-4, rtol=1e-4)
    assert len(calls) == 3 * is_fused, "what is still to be added has to be added before a norm"
    for linear in linears.values():
        linear.wrap(lambda product: product)
        assert linear.fused(rows) is None, "a weight that is fetched for each product is not read by another kernel"


@pytest.mark.parametrize("affine", ["weight and bias", "weight", "", "rms"])
def test_norms_of_sums(affine: str) -> None:
    """Of a sublayer's output, and of the outputs of experts."""
    rows, hidden = 3, 40
    layer_norm = LayerNorm(WeightTable(torch.float32, DEVICE), "norm", hidden, bool(affine), bias="bias" in affine)
    for vector in (layer_norm.weight, layer_norm.bias):
        if vector is not None:
            vector.copy_(torch.randn(hidden))
    norm: Norm = RMSNorm(torch.randn(hidden, device=DEVICE), 1e-6) if affine == "rms" else layer_norm
    residual, delta = torch.randn(2, rows, hidden, device=DEVICE)
    experts = torch.randn(rows, 2, hidden, device=DEVICE)

    def run(ops: FusedOps) -> list[torch.Tensor]:
        total = residual.clone()
        normed = [ops.add_norm(total, given, norm) for given in (delta, experts, None)]
        return [*normed, total, ops.norm_of_sum(residual.clone(), delta.clone(), norm)]

    for got, want in zip(run(TritonOps()), run(TorchOps()), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
