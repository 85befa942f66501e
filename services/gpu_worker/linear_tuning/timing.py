"""Times linear layers on a GPU with given kernel configs. Imports Triton: for GPUs only.

A measurement replays a CUDA graph that reads the weights of many layers, so that the L2 cache hit rate is as low as in
a step. As in a step, a norm runs before each GEMM, unless the GEMM's kernel fuses the neighbouring operations.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockyard.kernels.layers.add_rms_norm import add_rms_norm, add_rms_norm_rounded
from blockyard.kernels.layers.rms_norm import RMSNorm
from blockyard.services.gpu_worker.layers.linear import Linear
from blockyard.services.gpu_worker.linear_tuning.kernel_configs import KernelConfig, LinearShape
from blockyard.services.gpu_worker.linear_tuning.products import Products
from blockyard.services.gpu_worker.quantization.method import Fusion

WEIGHT_BYTES = 400 << 20  # of different weights in one measurement; several times the L2 cache
LAUNCHES = 4  # fewest GEMMs in one measurement
REPEATS = 3
EXCERPT = 24  # linear layers, from the first on, that are timed together to compare kernel configs
EXCERPT_REPEATS = 6


class LinearTimer:
    """Times the linear layers of one model: `linears`, in the model's order. `layers` has each of their shapes once."""

    def __init__(
        self,
        linears: Sequence[Linear],
        layers: Sequence[LinearShape],
        products: Products,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """dtype: of the activations."""
        self._linears, self._layers, self._products = linears, layers, products
        self._device, self._dtype = device, dtype
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def seconds(self, config: KernelConfig, group: Sequence[Linear], rows: int) -> float:
        """Seconds of one GEMM with its norm, as the mean over `group`, layers of one shape."""
        some = group[: max(WEIGHT_BYTES // group[0].method.size_bytes, 1)]
        order = [(config, linear) for linear in some] * -(-LAUNCHES // len(some))
        return replay_seconds(self._step(order, rows)) / len(order)

    def step_seconds(self, configs: Sequence[KernelConfig], rows: int, norms: bool = True) -> float:
        """Seconds of all layers in order. `configs` has one kernel config for each shape."""
        return replay_seconds(self._step(self.order(configs), rows, norms))

    def excerpt_seconds(self, configs: Sequence[KernelConfig], rows: int) -> float:
        """Seconds of the first EXCERPT layers. `configs` has one kernel config for each shape."""
        return replay_seconds(self._step(self.order(configs)[:EXCERPT], rows), EXCERPT_REPEATS)

    def order(self, configs: Sequence[KernelConfig]) -> list[tuple[KernelConfig, Linear]]:
        """Each layer with the kernel config of its shape, in the model's order."""
        by_kind = dict(zip((layer.kind for layer in self._layers), configs, strict=True))
        return [(by_kind[kind_of(linear)], linear) for linear in self._linears]

    def _step(self, order: Sequence[tuple[KernelConfig, Linear]], rows: int, norms: bool = True) -> Callable[[], None]:
        """A callable that launches these GEMMs, with a norm before each if `norms`."""
        calls = [self.call(config, linear, rows, norms) for config, linear in order]

        def step() -> None:
            for call in calls:
                call()

        return step

    def call(self, config: KernelConfig, linear: Linear, rows: int, norms: bool = True) -> Callable[[], object]:
        """A callable that launches one GEMM. With `norms` it launches a norm first, or a fused kernel if it can."""
        in_features, out_features = linear.shape
        x, norm = self._rows(rows, in_features), RMSNorm(self._rows(1, in_features)[0], 1e-6)
        product = self._products.of(config, linear)
        if not norms:
            return lambda: product(x)
        rounded, rounding = self._products.rounded(config, linear), linear.rounding
        if rounded is not None and rounding is not None and (config.kernel != "skinny" or linear.fusion is Fusion.NONE):
            return lambda: rounded(add_rms_norm_rounded(x, None, norm.weight, norm.eps, rounding))
        if config.kernel != "skinny" or linear.fusion is Fusion.NONE:
            return lambda: product(add_rms_norm(x, None, norm.weight, norm.eps))
        fused = self._products.fused(config, linear)
        if linear.fusion is Fusion.NORM:
            return lambda: fused(x, norm)
        gated, total = linear.fusion is Fusion.GATED_ADD, self._rows(rows, out_features)
        given = self._rows(rows, 2 * in_features) if gated else x
        return lambda: fused(given, gated=gated, add_to=total)

    def _rows(self, rows: int, size: int) -> Tensor:
        """A random input, allocated once for each shape."""
        if (rows, size) not in self._inputs:
            self._inputs[rows, size] = torch.randn(rows, size, dtype=self._dtype, device=self._device)
        return self._inputs[rows, size]

    def free_inputs(self) -> None:
        self._inputs.clear()


def kind_of(linear: Linear) -> tuple[str | None, tuple[int, int]]:
    """As `LinearShape.kind`."""
    return linear.method.form, linear.shape


def replay_seconds(step: Callable[[], None], repeats: int = REPEATS) -> float:
    """Captures `step` in a CUDA graph and returns the seconds of the fastest of `repeats` replays."""
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
