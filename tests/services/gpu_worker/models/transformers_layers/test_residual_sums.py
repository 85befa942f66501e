"""Sums of the residual and a sublayer's output, computed with the norm behind them."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.fused_ops import TorchOps
from blockyard.services.gpu_worker.models.transformers_layers.module_calls import recorded_calls
from blockyard.services.gpu_worker.models.transformers_layers.norms import NormModule
from blockyard.services.gpu_worker.models.transformers_layers.residual_sums import SublayerOutput, find_sums


class Layer(nn.Module):
    def __init__(self, body: Callable[["Layer", Tensor], object]) -> None:
        super().__init__()
        self.out, self.other, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), LlamaRMSNorm(8, 1e-6)
        self._body = body

    def forward(self, x: Tensor) -> object:
        return self._body(self, x)


def scaled_in_place(m: Layer, x: Tensor) -> Tensor:
    total = x + m.out(x)
    total.mul_(2)
    return m.norm(total)


def twice(m: Layer, x: Tensor) -> Tensor:
    return m.norm(x + m.out(m.norm(x + m.out(x))))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (lambda m, x: m.norm(x + m.out(x)), {"out": "norm"}),
        (lambda m, x: m.norm(m.out(x) + x), {"out": "norm"}),
        (lambda m, x: m.norm(torch.add(x, m.out(x))), {"out": "norm"}),
        (lambda m, x: m.norm(x + 0.5 * m.out(x)), {}),
        (lambda m, x: m.norm(torch.add(x, m.out(x), alpha=2)), {}),
        (lambda m, x: m.norm((x + m.out(x)).clone()), {}),
        (lambda m, x: m.norm(m.other(x) + m.out(x)), {}),
        (lambda m, x: m.norm(x - m.out(x)), {}),
        (lambda m, x: m.norm(x[0, 0] + m.out(x)), {}),
        (scaled_in_place, {}),
        (twice, {}),
    ],
)
def test_sums_before_norms(body: Callable[[Layer, Tensor], object], expected: dict[str, str]) -> None:
    with torch.device("meta"):
        layer = Layer(body)
        with recorded_calls(layer) as calls, torch.no_grad():
            layer(torch.ones(1, 3, 8))
    assert find_sums(calls, ["norm"]) == expected
    assert find_sums(calls, []) == {}


class Ops(TorchOps):
    """Counts sums with norms."""

    def __init__(self) -> None:
        self.count = 0

    def sum_norm(self, residual: Tensor, delta: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        self.count += 1
        return super().sum_norm(residual, delta, norm)


def test_a_norm_has_its_result_before_it_is_called() -> None:
    ops, x, delta = Ops(), torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    norm = NormModule(RMSNorm(torch.randn(8), 1e-6), 8, ops)
    output = SublayerOutput.of(delta.clone(), norm.sums)
    for total in (x + output, output + x, torch.add(x, output)):
        assert type(total) is Tensor and torch.equal(total, x + delta)
        assert torch.equal(norm(total), norm(total.clone()))
    assert ops.count == 3
    total = x + output
    other = norm(x)
    torch.testing.assert_close(other, norm(x.clone()))
    torch.testing.assert_close(norm(total), norm(total.clone()))
    output.mul_(2)
    assert torch.equal(x + output, x + 2 * delta)
    count = ops.count
    for plain, expected in ((output.view(3, 8), 2 * delta.view(3, 8)), (x + 2 * output, x + 4 * delta)):
        assert type(plain) is Tensor and torch.equal(plain, expected)
    assert torch.equal(x.double() + output, x.double() + 2 * delta) and torch.equal(output + output, 4 * delta)
    assert torch.equal(x.transpose(1, 2).contiguous().transpose(1, 2) + output, x + 2 * delta)
    assert torch.equal(output + 1, 2 * delta + 1) and ops.count == count


def test_a_norm_keeps_no_tensor() -> None:
    norm = NormModule(RMSNorm(torch.randn(8), 1e-6), 8, TorchOps())
    for consume in (norm, lambda total: norm.sums.forget()):
        total = torch.randn(1, 3, 8) + SublayerOutput.of(torch.randn(1, 3, 8), norm.sums)
        seen = weakref.ref(total)
        consume(total)
        del total
        gc.collect()
        assert seen() is None
