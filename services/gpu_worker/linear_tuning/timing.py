"""Times linear layers on a GPU, by plans that are to be compared.

In a CUDA graph that goes through the weights of the model's layers, so that the L2 cache helps no more than in a step,
with a norm before each product, or what its kernel takes in, as in a step.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockyard.kernels.layers.add_rms_norm import add_rms_norm
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.linear import Fusion, Linear
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import KernelConfig, LinearShape
from blockyard.services.gpu_worker.linear_tuning.products import Products, dense_weight

WEIGHT_BYTES = 400 << 20  # of different weights in one measurement: several times the L2 cache
LAUNCHES = 4  # of one measurement at least
REPEATS = 3
EXCERPT = 24  # layers in which shapes are tried beside each other
EXCERPT_REPEATS = 6


class LinearTimer:
    """For the linear layers of one model, in its order, which are of the shapes of `layers`."""

    def __init__(self, linears: Sequence[Linear], layers: Sequence[LinearShape], products: Products) -> None:
        self._linears, self._layers, self._products = linears, layers, products
        weight = dense_weight(linears[0]).weight
        self._device, self._dtype = weight.device, weight.dtype
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def seconds(self, plan: KernelConfig, group: Sequence[Linear], rows: int) -> float:
        """Of one layer, over layers of one shape."""
        some = group[: max(WEIGHT_BYTES // dense_weight(group[0]).weight.nbytes, 1)]
        order = [(plan, linear) for linear in some] * -(-LAUNCHES // len(some))
        return _replay(self._step(order, rows)) / len(order)

    def step_seconds(self, plans: Sequence[KernelConfig], rows: int, norms: bool = True) -> float:
        """Of all layers, by one plan a shape."""
        return _replay(self._step(self.order(plans), rows, norms))

    def excerpt_seconds(self, plans: Sequence[KernelConfig], rows: int) -> float:
        """Of the first layers, by one plan a shape."""
        return _replay(self._step(self.order(plans)[:EXCERPT], rows), EXCERPT_REPEATS)

    def order(self, plans: Sequence[KernelConfig]) -> list[tuple[KernelConfig, Linear]]:
        """The plan of each layer, in the model's order."""
        by_shape = dict(zip(((layer.ins, layer.outs) for layer in self._layers), plans, strict=True))
        return [(by_shape[linear.shape], linear) for linear in self._linears]

    def _step(self, order: Sequence[tuple[KernelConfig, Linear]], rows: int, norms: bool = True) -> Callable[[], None]:
        """All of these products, and where asked for a norm before each."""
        calls = [self.call(plan, linear, rows, norms) for plan, linear in order]

        def step() -> None:
            for call in calls:
                call()

        return step

    def call(self, plan: KernelConfig, linear: Linear, rows: int, norms: bool = True) -> Callable[[], object]:
        """Of one product. Where its kernel takes in what is around it, that takes the place of the norm."""
        ins, outs = linear.shape
        x, norm = self._rows(rows, ins), RMSNorm(self._rows(1, ins)[0], 1e-6)
        product = self._products.of(plan, linear)
        if not norms:
            return lambda: product(x)
        if plan.kernel != "few" or linear.fusion is Fusion.NONE:
            return lambda: product(add_rms_norm(x, None, norm.weight, norm.eps))
        fused = self._products.fused(plan, linear)
        if linear.fusion is Fusion.NORM:
            return lambda: fused(x, norm)
        gated, total = linear.fusion is Fusion.GATED_ADD, self._rows(rows, outs)
        given = self._rows(rows, 2 * ins) if gated else x
        return lambda: fused(given, gated=gated, add_to=total)

    def _rows(self, rows: int, size: int) -> Tensor:
        """Of one memory for each shape."""
        if (rows, size) not in self._inputs:
            self._inputs[rows, size] = torch.randn(rows, size, dtype=self._dtype, device=self._device)
        return self._inputs[rows, size]

    def forget(self) -> None:
        """What products were timed on."""
        self._inputs.clear()


def _replay(step: Callable[[], None], repeats: int = REPEATS) -> float:
    """Seconds that it takes in a CUDA graph, the best of so many."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            step()
        graph.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        events[-1].synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    took: list[float] = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return min(took) / 1e3
