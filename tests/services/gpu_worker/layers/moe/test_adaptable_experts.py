"""Experts on a GPU with adapters, against the same experts with merged weights."""

import pytest
import torch
from adapter_tables import in_places, make_table
from torch import Tensor

from blockyard.kernels.lora.adapt_embeddings import adapt_embeddings
from blockyard.kernels.lora.add_adapters import add_adapters, start_adapters
from blockyard.kernels.lora.add_to_heads import add_to_heads
from blockyard.kernels.lora.replace_logits import replace_logits
from blockyard.kernels.moe.gates import Gate, gated
from blockyard.kernels.moe.routing import Routing
from blockyard.services.gpu_worker.layers.adapter_rows import AdapterRows
from blockyard.services.gpu_worker.layers.moe.expert_weights import ExpertWeights
from blockyard.services.gpu_worker.lora.device.device_products import AdapterKernels, DeviceAdaptedExperts
from blockyard.services.gpu_worker.quantization.dense import UnquantizedExperts

pytestmark = pytest.mark.cuda
IS_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.float16) if IS_GPU else ("cpu", torch.float32)
EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 64, 32
ROUTING = Routing(num_experts=EXPERTS, top_k=TOP_K)
KERNELS = AdapterKernels(start_adapters, add_to_heads, adapt_embeddings, replace_logits)
RANKS = [[3, 0], [18, 2], [0, 0], [1, 5]], [[2], [0], [20], [1]]  # of one adapter: gate and up, and down, by expert


class Case:
    """A layer with an adapter in the second of two places."""

    def __init__(self, gate: Gate, *, scales_input: bool, bias: bool) -> None:
        from blockyard.services.gpu_worker.layers.moe.grouped_experts import GroupedExperts

        torch.manual_seed(4)
        self.gate, self.scales_input = gate, scales_input
        self.gate_up, self.down = self._experts(2 * INNER, HIDDEN, bias), self._experts(HIDDEN, INNER, bias)
        weights = ExpertWeights(gate_up=self.gate_up, down=self.down, device=torch.device(DEVICE))
        self.layer, self.rows = GroupedExperts(weights, ROUTING, gate, scales_input), AdapterRows()
        self.added: list[Tensor] = []  # [experts, out, in] of both products
        for matrix, ranks, sizes, inputs in zip(
            self.layer.matrices(), RANKS, ([INNER, INNER], [HIDDEN]), (HIDDEN, INNER), strict=True
        ):
            none = [[0] * len(sizes)] * EXPERTS
            alone = make_table(none + ranks, sizes, inputs, DTYPE)
            matrix.adapt(DeviceAdaptedExperts(self.rows, in_places(alone, EXPERTS), KERNELS))
            eye = torch.eye(inputs, device=DEVICE).to(DTYPE)
            of_experts = []
            for expert in range(EXPERTS):
                out = torch.zeros(inputs, sum(sizes), device=DEVICE)
                places = torch.full((inputs,), EXPERTS + expert, dtype=torch.int32, device=DEVICE)
                add_adapters(eye, places, alone, out)
                of_experts.append(out.T.double())
            self.added.append(torch.stack(of_experts))

    def _experts(self, outs: int, size: int, bias: bool) -> UnquantizedExperts:
        weight = torch.randn(EXPERTS, outs, size, device=DEVICE).to(DTYPE) * size**-0.5
        return UnquantizedExperts(weight, torch.randn(EXPERTS, outs, device=DEVICE).to(DTYPE) / 4 if bias else None)

    def want(self, x: Tensor, experts: Tensor, factors: Tensor, places: list[int]) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
        for row, place in enumerate(places):
            for expert, factor in zip(experts[row].tolist(), factors[row].double(), strict=True):
                y = x[row].double() * (factor if self.scales_input else 1)
                for which, method in enumerate((self.gate_up, self.down)):
                    weight = method.weight[expert].double() + (self.added[which][expert] if place == 1 else 0)
                    y = weight @ y + (0 if method.bias is None else method.bias[expert].double())
                    y = gated(y, self.gate) if which == 0 else y
                out[row] += y * (1 if self.scales_input else factor)
        return out


@pytest.mark.filterwarnings("ignore:.*encountered in")  # the interpreter's, for places without a pair
@pytest.mark.parametrize(
    ("gate", "scales_input", "bias"),
    [(Gate.SILU, False, False), (Gate.CLAMPED_SWIGLU, False, True), (Gate.GELU_TANH, True, False)],
)
@pytest.mark.parametrize("rows", [1, 20, *([200] if IS_GPU else [])])  # of many rows, kernels that read by descriptors
def test_as_merged_weights(gate: Gate, scales_input: bool, bias: bool, rows: int) -> None:
    case = Case(gate, scales_input=scales_input, bias=bias)
    layer, places = case.layer, [(1, -1, 0)[row % 3] for row in range(rows)]
    x = torch.randn(rows, HIDDEN, device=DEVICE).to(DTYPE)
    experts, factors = layer.choose(torch.randn(rows, EXPERTS, device=DEVICE), None)
    shared, before = torch.randn(rows, HIDDEN, device=DEVICE).to(DTYPE), layer.forward(x, experts, factors, None)
    case.rows.begin(torch.tensor(places, dtype=torch.int32, device=DEVICE))
    assert not layer.fuses_norm(1)
    want = case.want(x, experts, factors, places)
    for is_invariant in (False, True):
        got = layer.forward(x, experts, factors, None, is_invariant)
        assert got is not None and error(got, want) < (3e-3 if IS_GPU else 1e-5)
        more = layer.forward(x, experts, factors, shared, is_invariant, residual=torch.zeros_like(x))
        assert more is not None and error(more, want + shared.double()) < (3e-3 if IS_GPU else 1e-5)
    assert before is not None and error(before, want) > 0.05, "an adapter without an effect shows nothing"
    case.rows.end()
    again = layer.forward(x, experts, factors, None)
    assert again is not None and torch.equal(again, before)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())
